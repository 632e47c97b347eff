"""Write an event in SQLAlchemy's transaction, by one SQL call: the order and its event are stored, or neither is.

    make db                                            # leaves a server running, and prints this:
    export RELAY_DISPATCH_DSN=postgresql://…           # the gateway's
    .venv/bin/python examples/08_outbox_sqlalchemy.py  # needs sqlalchemy[asyncio]

The tenant is named in the call, or bound before it.
"""

import os
import sys

import anyio
from sqlalchemy import Column, Integer, MetaData, Table, bindparam, insert, select, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from dispatch_core import OutboxEvent
from gateway_sdk import OutboxDrainer

DSN = os.environ.get("RELAY_DISPATCH_DSN") or sys.exit("set RELAY_DISPATCH_DSN: `make db` prints what")
ORDER = bindparam("order", type_=JSONB)  # so that SQLAlchemy makes the JSON
NAMED = text("select relay.outbox_enqueue('alchemy.order', :order, p_tenant => 'acme')").bindparams(ORDER)
BOUND = text("select relay.outbox_enqueue('alchemy.order', :order)").bindparams(ORDER)
drainer = OutboxDrainer(DSN, tenants=["acme"])
orders = Table("orders", MetaData(), Column("number", Integer), prefixes=["temporary"])


async def place_orders(session: AsyncSession) -> None:
    async with session.begin():
        await session.execute(insert(orders).values(number=1))
        await session.execute(NAMED, {"order": {"number": 1}})
    async with session.begin():
        await session.execute(insert(orders).values(number=2))
        await session.execute(text("select set_config('app.tenant_id', 'acme', true)"))  # till the transaction ends
        await session.execute(BOUND, {"order": {"number": 2}})
    await session.execute(insert(orders).values(number=3))
    await session.execute(NAMED, {"order": {"number": 3}})
    await session.rollback()


@drainer.sink("alchemy.order")
async def deliver(event: OutboxEvent) -> None:
    print(f"order {event.payload['number']} of {event.tenant_id}: event {event.event_id}")


async def main() -> None:
    engine = create_async_engine(DSN.replace("postgresql", "postgresql+asyncpg", 1))
    async with engine.connect() as conn, AsyncSession(conn) as session:
        await conn.run_sync(orders.metadata.create_all)
        await conn.commit()
        await place_orders(session)
        placed = (await session.scalars(select(orders.c.number))).all()
    await engine.dispose()
    print(f"done: orders {placed}, {(await drainer.drain_all()).delivered} events delivered")


if __name__ == "__main__":
    anyio.run(main)
