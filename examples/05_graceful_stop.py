"""Stop a relay by SIGTERM, and see what becomes of its work: finished, given back, or failed, but never left lying.

    make db                                            # leaves a server running, and prints these two:
    export RELAY_DISPATCH_DSN=postgresql://…           # the gateway's
    export RELAY_WORKER_DSN=postgresql://…             # the worker's
    .venv/bin/python examples/05_graceful_stop.py

The relay is a child process: this file again, with the argument `relay`. Its handlers get one second to finish in.
"""

import os
import signal
import sys

import anyio

from gateway_sdk import GatewayClient
from relay_sdk import DispatchJob, Relay, RelaySettings, Reply

if missing := {"RELAY_DISPATCH_DSN", "RELAY_WORKER_DSN"} - os.environ.keys():
    sys.exit(f"set {' and '.join(sorted(missing))}: `make db` prints what")
relay = Relay("reports", tenants=["acme"], dsn=os.environ["RELAY_WORKER_DSN"], settings=RelaySettings(grace_seconds=1))
# seconds that a report takes the first time, and how many attempts it has; three of them may run at once
REPORTS = {"short": (0.5, 1), "long": (60, 1), "long, may be repeated": (60, 2), "not started": (0, 1)}


@relay.handler("Report", concurrency=3)
async def report(job: DispatchJob) -> Reply:
    name, seconds = job.json()
    print(f"  {name}: attempt {job.attempt}", flush=True)
    await anyio.sleep(seconds if job.attempt == 1 else 0)
    return Reply()


async def main() -> None:
    async with GatewayClient(os.environ["RELAY_DISPATCH_DSN"]) as client:
        acme = client.tenant("acme")
        jobs = {}
        for name, (seconds, attempts) in REPORTS.items():
            jobs[name] = await acme.enqueue("reports", "Report", json=[name, seconds], max_attempts=attempts)
        child = await anyio.open_process([sys.executable, __file__, "relay"], stderr=None)
        async with child:
            said = b""
            while said.count(b"attempt 1\n") < 3 and child.stdout:
                said += await child.stdout.receive()
            child.send_signal(signal.SIGTERM)
            print(f"the relay's handlers:\n{said.decode()}SIGTERM: exit code {await child.wait()}")
        before = [result for job_id in jobs.values() if (result := await acme.poll_status(job_id))]
        for name, end in zip(jobs, before, strict=True):
            print(f"  {name}: {end.status}, attempts used: {end.attempt} {end.error_code or ''}")
        print("another relay gets at once what was given back:")
        await relay.run(drain=True)
        after = [result for job_id in jobs.values() if (result := await acme.poll_status(job_id))]
    print("done:", ", ".join(f"{first.status} > {then.status}" for first, then in zip(before, after, strict=True)))


if __name__ == "__main__":
    relay.main() if sys.argv[1:] == ["relay"] else anyio.run(main)
