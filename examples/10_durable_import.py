"""An import that no kill -9 hurts: every good row is in the table once, and every bad one is told of.

    .venv/bin/python examples/10_durable_import.py                # on a server of its own; --help tells more

Two programs. The *submitter* cuts a CSV file into the chunks of a durable job. *Relays*, any number of them, read their
parts, and store rows and checkpoint in one transaction. They are below, as anybody would write them. Run without a
role, this file makes a CSV of which 1 % is bad, starts two relays, kills one of them half-way by SIGKILL
(kill_half_way.py), with `relay-dispatch durable watch` beside it, and counts what came of it.
"""

import os
import sys
from collections.abc import Iterator
from csv import reader
from itertools import islice
from pathlib import Path

import anyio
from anyio import to_thread

from gateway_sdk import ChunkSpec, GatewayClient
from relay_sdk import ChunkContext, Relay

DISPATCH_DSN, WORKER_DSN = map(os.environ.get, ("RELAY_DISPATCH_DSN", "RELAY_WORKER_DSN"))


def parts_of(path: str, rows: int) -> Iterator[ChunkSpec]:
    with Path(path).open("rb") as file:
        first, offset = 1, len(file.readline())  # behind the header
        while size := sum(1 for _ in islice(file, rows)):
            yield ChunkSpec({"first": first, "offset": offset}, rows=size)
            first, offset = first + size, file.tell()


def read(path: str, offset: int, rows: int) -> tuple[list[list[str]], int]:
    with Path(path).open("rb") as file:
        file.seek(offset)
        lines = list(islice(file, rows))
        return list(reader(line.decode() for line in lines)), file.tell()


async def submit(path: str, rows: int) -> None:
    async with GatewayClient(DISPATCH_DSN) as client:
        params = {"file": path, "at_once": max(rows // 5, 1)}
        print(await client.tenant("acme").durable.submit("people", parts_of(path, rows), params=params))


async def relay() -> None:
    importer = Relay("importer", tenants=["acme"], dsn=WORKER_DSN)

    @importer.chunk_handler("people", concurrency=2)
    async def import_people(ctx: ChunkContext) -> None:
        # Where the last transaction that has committed left off, be it of this process or of one that is dead.
        at = ctx.checkpoint or ctx.payload
        first, offset, end = at["first"], at["offset"], ctx.payload["first"] + ctx.rows_total
        while first < end:
            ctx.stopping.check()  # a pause, or the end of this relay: the chunk is given back as it stands
            size = min(ctx.params["at_once"], end - first)
            rows, offset = await to_thread.run_sync(read, ctx.params["file"], offset, size)
            people = []
            for number, (name, age) in enumerate(rows, first):
                if age.isdecimal():
                    people.append((number, name, int(age)))
                else:
                    ctx.row_error(number, "AGE", f"{age!r} is no age", {"name": name})
            first += size
            async with ctx.transaction() as conn:  # rows, bad rows and checkpoint: all of it or nothing
                await conn.copy_records_to_table("people", records=people)
                ctx.advance(len(people))
                await ctx.save_checkpoint({"first": first, "offset": offset})

    await importer.run()


if __name__ == "__main__":
    if sys.argv[1:2] == ["submit"]:
        anyio.run(submit, sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["relay"]:
        anyio.run(relay)
    else:
        from kill_half_way import main

        sys.exit(main(__file__))
