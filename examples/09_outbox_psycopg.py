"""Write an event in psycopg's transaction, by one SQL call: the order and its event are stored, or neither is.

    make db                                            # leaves a server running, and prints this:
    export RELAY_DISPATCH_DSN=postgresql://…           # the gateway's
    .venv/bin/python examples/09_outbox_psycopg.py     # needs psycopg[binary]

The tenant is named in the call, or bound before it.
"""

import os
import sys

import anyio
import psycopg
from psycopg.types.json import Jsonb

from dispatch_core import OutboxEvent
from gateway_sdk import OutboxDrainer

DSN = os.environ.get("RELAY_DISPATCH_DSN") or sys.exit("set RELAY_DISPATCH_DSN: `make db` prints what")
drainer = OutboxDrainer(DSN, tenants=["acme"])


def place_orders(conn: psycopg.Connection) -> None:
    with conn.transaction():
        conn.execute("insert into orders values (1)")
        conn.execute("select relay.outbox_enqueue('psycopg.order', %s, p_tenant => 'acme')", [Jsonb({"number": 1})])
    with conn.transaction():
        conn.execute("insert into orders values (2)")
        conn.execute("select set_config('app.tenant_id', 'acme', true)")  # true: until the transaction ends
        conn.execute("select relay.outbox_enqueue('psycopg.order', %s)", [Jsonb({"number": 2})])
    with conn.transaction():
        conn.execute("insert into orders values (3)")
        conn.execute("select relay.outbox_enqueue('psycopg.order', %s, p_tenant => 'acme')", [Jsonb({"number": 3})])
        raise psycopg.Rollback


@drainer.sink("psycopg.order")
async def deliver(event: OutboxEvent) -> None:
    print(f"order {event.payload['number']} of {event.tenant_id}: event {event.event_id}")


def main() -> None:
    with psycopg.connect(DSN, autocommit=True) as conn:
        conn.execute("create temporary table orders (number int)")
        place_orders(conn)
        orders = [number for (number,) in conn.execute("select number from orders")]
    report = anyio.run(drainer.drain_all)
    print(f"done: orders {orders}, {report.delivered} events delivered")


if __name__ == "__main__":
    main()
