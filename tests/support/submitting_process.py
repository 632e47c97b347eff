"""A gateway in a process of its own that submits a durable job of which the chunks never end.

    python -m tests.support.submitting_process DSN TENANT

It prints a line when some of them are stored, and then waits to be killed.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import anyio

from gateway_sdk import DurableJobsSettings, GatewayClient


async def chunks() -> AsyncIterator[int]:
    for n in range(20):
        yield n
    print("submitting", flush=True)
    await anyio.sleep_forever()


async def main(dsn: str, tenant: str) -> None:
    async with GatewayClient(dsn, durable=DurableJobsSettings(insert_batch=3)) as client:
        await client.tenant(tenant).durable.submit("import", chunks())


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
