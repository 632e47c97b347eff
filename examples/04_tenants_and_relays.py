"""Several tenants and several relays: who gets what, fair turns, and what one tenant can learn of another (nothing).

    make db                                            # leaves a server running, and prints these two:
    export RELAY_DISPATCH_DSN=postgresql://…           # the gateway's
    export RELAY_WORKER_DSN=postgresql://…             # the worker's
    .venv/bin/python examples/04_tenants_and_relays.py

In production each relay has a login of its own, bound to what it serves and to nothing else, as by
    relay-dispatch db grant erp_worker --as worker --tenant acme --relay erp
"""

import os
import sys

import anyio

from gateway_sdk import DispatchRequest, GatewayClient
from relay_sdk import DispatchJob, Relay, Reply, run_relays

if missing := {"RELAY_DISPATCH_DSN", "RELAY_WORKER_DSN"} - os.environ.keys():
    sys.exit(f"set {' and '.join(sorted(missing))}: `make db` prints what")
TENANTS = ["acme", "globex"]
erp = Relay("erp", tenants=TENANTS, dsn=os.environ["RELAY_WORKER_DSN"], concurrency=4)  # few, to see the turns
archive = Relay("archive", tenants=["globex"], dsn=os.environ["RELAY_WORKER_DSN"])
turns: list[str] = []


@erp.handler("Total")
async def total(job: DispatchJob) -> Reply:
    turns.append(job.tenant_id)
    return Reply.json({"tenant": job.tenant_id, "total": sum(job.json())})


@archive.handler("Store")
async def store(job: DispatchJob) -> Reply:
    return Reply(f"stored for {job.tenant_id}")


async def main() -> None:
    async with GatewayClient(os.environ["RELAY_DISPATCH_DSN"]) as client, anyio.create_task_group() as tasks:
        acme, globex = (client.tenant(name) for name in TENANTS)
        # acme is first, and has ten times as much; globex gets its turn all the same.
        many = await acme.enqueue_many(DispatchRequest("erp", "Total", json=[n, 1]) for n in range(100))
        few = await globex.enqueue_many(DispatchRequest("erp", "Total", json=[n, 2]) for n in range(10))
        tasks.start_soon(run_relays, [erp, archive])  # they share connections
        ended = [result.status async for result in acme.as_completed(many, timeout=30)]
        ended += [result.status async for result in globex.as_completed(few, timeout=30)]
        print("turns:", " ".join(turns[:24]), "…")
        kept = await globex.call("archive", "Store", body=b"a letter", timeout=10)
        foreign = await globex.poll_status(many[0])  # acme's job: as if there were none
        erp.stop()
        archive.stop()
    late = len(turns) - turns[::-1].index("globex")
    print(f"globex had its last turn as number {late} of {len(turns)}; {kept.response_body!r}")
    print(f"done: {ended.count('succeeded')} of {len(ended)} succeeded; acme's job, asked for by globex: {foreign}")


if __name__ == "__main__":
    anyio.run(main)
