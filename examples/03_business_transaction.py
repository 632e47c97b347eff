"""Enqueue inside a transaction of your own: the order and its job are stored together, or neither is.

    make db                                            # leaves a server running, and prints this:
    export RELAY_DISPATCH_DSN=postgresql://…           # the gateway's
    .venv/bin/python examples/03_business_transaction.py

The connection is yours: any asyncpg connection to the same database, of a login that is bound as a gateway.
"""

import os
import sys
from uuid import UUID

import anyio
import asyncpg

from gateway_sdk import GatewayClient, TenantClient

DSN = os.environ.get("RELAY_DISPATCH_DSN") or sys.exit("set RELAY_DISPATCH_DSN: `make db` prints what")


class CardRefusedError(Exception):
    pass


async def place_order(conn: asyncpg.Connection, acme: TenantClient, number: int, *, card_is_good: bool) -> UUID:
    """Store an order and the job that ships it."""
    async with conn.transaction():
        await conn.execute("insert into orders values ($1)", number)
        # The relay is woken by the commit: not before, and not at all if there is none.
        job_id = await acme.enqueue("warehouse", "Ship", json={"order": number}, conn=conn)
        seen = await acme.poll_status(job_id)  # on another connection, as anybody else sees it
        print(f"order {number}: job {job_id} is {'visible already' if seen else 'not visible yet'}")
        if not card_is_good:
            refused = CardRefusedError(f"order {number}")
            refused.add_note(str(job_id))
            raise refused
    return job_id


async def main() -> None:
    conn = await asyncpg.connect(DSN)
    await conn.execute("create temporary table orders (number int primary key)")
    async with GatewayClient(DSN) as client:
        acme = client.tenant("acme")
        job_id = await place_order(conn, acme, 1, card_is_good=True)
        stored = await acme.poll_status(job_id)
        try:
            await place_order(conn, acme, 2, card_is_good=False)
        except CardRefusedError as error:
            print(f"{error} is rolled back")
            gone = await acme.poll_status(UUID(error.__notes__[0]))
    orders = await conn.fetchval("select array_agg(number) from orders")
    await conn.close()
    print(f"done: orders {orders}; the job of order 1 is {stored and stored.status}, that of order 2 is {gone}")


if __name__ == "__main__":
    anyio.run(main)
