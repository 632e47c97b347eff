"""Run a relay: a process of its own, until Ctrl-C or SIGTERM.

    make db                                            # leaves a server running, and prints these two:
    export RELAY_DISPATCH_DSN=postgresql://…           # the gateway's
    export RELAY_WORKER_DSN=postgresql://…             # the worker's
    .venv/bin/python examples/02_relay.py

and in another terminal, as the gateway:

    .venv/bin/relay-dispatch jobs enqueue acme erp-emea GetInvoice --json '{"number": 7}' --wait
    .venv/bin/relay-dispatch jobs enqueue acme erp-emea HashDocument --body 'any text' --wait
"""

import hashlib
import os
import sys

from relay_sdk import DispatchJob, Reject, Relay, Reply, Retry

if "RELAY_WORKER_DSN" not in os.environ:
    sys.exit("set RELAY_WORKER_DSN: `make db` prints what")

relay = Relay("erp-emea", tenants=["acme"], dsn=os.environ["RELAY_WORKER_DSN"])


@relay.handler("GetInvoice", timeout=20, concurrency=50)
async def get_invoice(job: DispatchJob) -> Reply:
    """Answer JSON. `timeout` is for the handler; `job.remaining()` is what the gateway still has patience for."""
    return Reply.json({"invoice": job.json()["number"], "total": 4200, "attempt": job.attempt})


@relay.handler("BookStock")
async def book_stock(job: DispatchJob) -> Reply:
    """Come again later: counted as an attempt, so the gateway must have allowed several (`max_attempts`)."""
    if job.attempt == 1:
        raise Retry(after=0.2, message="the warehouse is busy")
    return Reply(status=204)


@relay.handler("HashDocument", concurrency=4)
def hash_document(job: DispatchJob) -> Reply:
    """Compute: a `def` handler runs in a thread, and so does not keep the relay from its heartbeats."""
    return Reply(hashlib.sha256(job.body).hexdigest())


@relay.fallback
async def anything_else(job: DispatchJob) -> Reply:
    """Answer what has no handler; without a fallback such a job ends `failed`, S2R-UNKNOWN-OPERATION."""
    raise Reject("NOT-SERVED", f"{job.operation} is not served here", status=501)


if __name__ == "__main__":
    print(f"relay {relay.relay_id} works for {', '.join(relay.tenants)}", flush=True)
    relay.main()
    print(f"done: {relay.metrics.jobs_succeeded} jobs succeeded, {relay.metrics.jobs_failed} failed")
