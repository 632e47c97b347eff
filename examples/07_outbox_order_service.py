"""An order service whose orders are shipped elsewhere, and nothing is lost, whatever is killed, and when.

    .venv/bin/python examples/07_outbox_order_service.py                # on a server of its own; --help tells more

Three programs, each a process. The *shop* has a database of its own: there it stores an order and the event that tells
of it in one transaction. The *drainer* makes a dispatch job of each event, in another database. The *relay*, of the
warehouse, ships what is ordered. They are below, as anybody would write them. Run without a role, this file starts them
and kills each with SIGKILL, at one step after the other (kill_each_step.py), and looks whether every order was shipped.
"""

import os
import sys

import anyio
import asyncpg

from dispatch_core import Outbox
from gateway_sdk import DispatchSink, GatewayClient, OutboxDrainer, OutboxRoute
from relay_sdk import DispatchJob, Relay, Reply

SHOP_DSN, DISPATCH_DSN, WAREHOUSE_DSN = map(os.environ.get, ("OUTBOX_DSN", "RELAY_DISPATCH_DSN", "RELAY_WORKER_DSN"))
REFUSED = 5  # the card of every fifth customer


async def shop() -> None:
    conn = await asyncpg.connect(SHOP_DSN)
    for line in sys.stdin:  # the number of an order each; in a real shop, requests
        transaction = conn.transaction()
        await transaction.start()
        # An order that is there already was stored before somebody pulled the plug, and so was its event.
        if await conn.fetchval("insert into orders values ($1) on conflict do nothing returning true", int(line)):
            await Outbox.enqueue(conn, "order.placed", {"order": int(line)}, tenant="acme")
        await (transaction.rollback() if int(line) % REFUSED == 0 else transaction.commit())
        print(line, end="", flush=True)
    await conn.close()


async def drainer() -> None:
    outbox = OutboxDrainer(SHOP_DSN)
    client = GatewayClient(DISPATCH_DSN, outbox=outbox)
    route = OutboxRoute("warehouse", "Ship", ttl=3600, max_attempts=20)
    outbox.add_sink("order.placed", DispatchSink(client, {"order.placed": route}))
    async with client:  # and with it the drainer
        await anyio.sleep_forever()


async def relay() -> None:
    warehouse = Relay("warehouse", tenants=["acme"], dsn=WAREHOUSE_DSN)
    async with asyncpg.create_pool(WAREHOUSE_DSN, min_size=1) as journal:

        @warehouse.handler("Ship")
        async def ship(job: DispatchJob) -> Reply:
            # A job may be handed over again when its relay has died, so this must bear a second time.
            await journal.execute(
                "insert into journal values ($1, $2, $3)", job.json()["order"], job.job_id, job.attempt
            )
            return Reply()

        await warehouse.run()


if __name__ == "__main__":
    roles = {"shop": shop, "drainer": drainer, "relay": relay}
    if sys.argv[1:2] and sys.argv[1] in roles:
        anyio.run(roles[sys.argv[1]])
    else:
        from kill_each_step import main

        sys.exit(main(__file__))
