"""Enqueue a job, do something else, wait for its result; then the two in one call.

    make db                                            # leaves a server running, and prints these two:
    export RELAY_DISPATCH_DSN=postgresql://…           # the gateway's
    export RELAY_WORKER_DSN=postgresql://…             # the worker's
    .venv/bin/python examples/01_enqueue_and_wait.py

The relay runs in the same process here, so that one command shows both sides; 02 is a relay as it is in real life.
"""

import os
import sys

import anyio

from gateway_sdk import GatewayClient
from relay_sdk import DispatchJob, Reject, Relay, Reply

if missing := {"RELAY_DISPATCH_DSN", "RELAY_WORKER_DSN"} - os.environ.keys():
    sys.exit(f"set {' and '.join(sorted(missing))}: `make db` prints what")

relay = Relay("erp-emea", tenants=["acme"], dsn=os.environ["RELAY_WORKER_DSN"])


@relay.handler("GetInvoice", timeout=20)
async def get_invoice(job: DispatchJob) -> Reply:
    number = job.json()["number"]
    if number > 1000:
        raise Reject("INVOICE-UNKNOWN", f"there is no invoice {number}", status=404)
    return Reply.json({"invoice": number, "total": 4200}, headers={"x-request": job.headers["x-request"]})


async def main() -> None:
    async with GatewayClient(os.environ["RELAY_DISPATCH_DSN"]) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(relay.run)
        acme = client.tenant("acme")

        job_id = await acme.enqueue("erp-emea", "GetInvoice", headers={"x-request": "r-1"}, json={"number": 7}, ttl=30)
        print("enqueued", job_id)
        # … anything else; the job is stored, and goes on whatever becomes of this process …
        result = await acme.wait(job_id, timeout=10)
        print(result.status, result.response_status, result.response_headers, result.json())

        # What a handler refuses is a result too, and not an exception.
        refused = await acme.call(
            "erp-emea", "GetInvoice", headers={"x-request": "r-2"}, json={"number": 5000}, timeout=10
        )
        print(refused.status, refused.response_status, refused.error_code, refused.error_message)
        relay.stop()
    print(f"done: invoice 7 {result.status}, total {result.json()['total']}; invoice 5000 {refused.error_code}")


if __name__ == "__main__":
    anyio.run(main)
