"""Make a CSV, have two relays of 10_durable_import.py import it, kill one of them half-way, and count the rows.

The relay that is to die reaches PostgreSQL over a wire that can hold still (dispatch_core/dev/wire.py). It is killed at
the worst moment that there is: a transaction with rows and checkpoint has committed, and nobody has heard of that yet.
The program knows nothing of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import anyio
import anyio.abc
from anyio.streams.text import TextReceiveStream
from kill_each_step import connected

from dispatch_core.dev.logins import GATEWAY_LOGIN, OPERATOR_LOGIN, WORKER_LOGIN, run_blocking
from dispatch_core.dev.postgres import DevServer, start_server
from dispatch_core.dev.wire import Wire
from dispatch_core.migrate import grant, migrate

SETTINGS = {
    "DURABLE_LEASE_SECONDS": "1.5",
    "DURABLE_SWEEP_SECONDS": "0.2",
}
BOTH_LISTEN = """
select count(*) = 2 from pg_stat_activity where datname = $1 and application_name like '% listener %'
"""
PROLOGUE = """\
{rows:,} rows, of which each 100th is bad, in {chunks} chunks. Two relays import them, each two chunks at a time. One
is killed by SIGKILL half-way. What it had in hand is taken over after its lease, here 1.5 s (by default 60).
"""


# --- the stage ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A database, and the file."""

    server: DevServer
    database: str
    file: Path
    rows: int
    chunks: int

    @property
    def bad(self) -> set[int]:
        """The numbers of the bad rows."""
        return set(range(7, self.rows + 1, 100))

    @property
    def good(self) -> set[int]:
        """Those of all others."""
        return set(range(1, self.rows + 1)) - self.bad

    def write_file(self) -> None:
        """Make the CSV."""
        with self.file.open("w") as file:
            file.write("name,age\n")
            for row in range(1, self.rows + 1):
                file.write(f"person {row},{'old' if row % 100 == 7 else row % 90}\n")


@contextlib.contextmanager
def stage(rows: int, chunks: int) -> Iterator[Stage]:
    """Start a server that is thrown away afterwards, or use that of RELAY_DISPATCH_TEST_DSN; make database and file."""
    with start_server(ephemeral=True) as server, tempfile.TemporaryDirectory() as directory:
        name = f"durable_import_{secrets.token_hex(4)}"
        where = Stage(server, name, Path(directory) / "people.csv", rows, chunks)
        where.write_file()
        try:
            run_blocking(_make(where))
            yield where
        finally:
            if not server.is_ours:
                run_blocking(_drop(where))


async def _make(where: Stage) -> None:
    where.server.create_database(where.database)
    dsn = where.server.admin_dsn_of(where.database)
    await migrate(dsn)
    await grant(dsn, GATEWAY_LOGIN, role="gateway", tenant="acme")
    await grant(dsn, WORKER_LOGIN, role="worker", tenant="acme", relay="importer")
    await grant(dsn, OPERATOR_LOGIN, role="operator", tenant="acme")
    async with connected(dsn) as conn:
        # No key: it would hide a row that is stored a second time.
        await conn.execute("create table people (row int, name text, age int)")
        await conn.execute(f"grant insert on people to {WORKER_LOGIN}")


async def _drop(where: Stage) -> None:
    async with connected(where.server.admin_dsn) as conn:
        await conn.execute(f"drop database if exists {where.database} with (force)")


# --- the processes ------------------------------------------------------------------------------


class Programs:
    """The relays and the submitter, each a process."""

    def __init__(self, program: str, where: Stage, wire: Wire, log: IO[str]) -> None:
        self._program = program
        self._where = where
        self._wire = wire
        self._log = log

    def _environment(self, wire: Wire | None) -> dict[str, str]:
        """Leave out what is set for a real gateway or relay."""
        server, name = self._where.server, self._where.database
        prefixes = ("RELAY_", "GATEWAY_", "OUTBOX_", "DURABLE_")
        worker = server.worker_dsn(name)
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith(prefixes)},
            **SETTINGS,
            "RELAY_DISPATCH_DSN": server.gateway_dsn(name),
            "RELAY_WORKER_DSN": worker if wire is None else wire.dsn(worker),
        }

    @asynccontextmanager
    async def relay(self, *, on_the_wire: bool) -> AsyncIterator[anyio.abc.Process]:
        """Run a relay for the block; it is killed at its end."""
        process = await anyio.open_process(
            [sys.executable, self._program, "relay"],
            env=self._environment(self._wire if on_the_wire else None),
            stderr=self._log,
        )
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                await kill(process)

    async def submit(self) -> str:
        """Submit the job; return its id."""
        rows = -(-self._where.rows // self._where.chunks)
        done = await anyio.run_process(
            [sys.executable, self._program, "submit", str(self._where.file), str(rows)],
            env=self._environment(None),
            stderr=self._log,
        )
        return done.stdout.decode().strip()

    async def watch(self, job_id: str) -> None:
        """Run `relay-dispatch durable watch` as an operator, and print what it says."""
        arguments = ["durable", "watch", job_id, "--interval", "0.5"]
        dsn = self._where.server.operator_dsn(self._where.database)
        async with await anyio.open_process(
            [sys.executable, "-m", "dispatch_core.cli", *arguments],
            env=self._environment(None) | {"RELAY_DISPATCH_DSN": dsn},
            stderr=self._log,
        ) as process:
            assert process.stdout is not None
            rest = ""
            async for text in TextReceiveStream(process.stdout):
                *lines, rest = (rest + text).split("\n")
                for line in lines:
                    print(f"  watch | {line}", flush=True)

    def complain(self) -> str:
        """Return what the programs said last."""
        self._log.seek(0)
        return self._log.read()[-4000:]


async def kill(process: anyio.abc.Process) -> None:
    """Kill by SIGKILL, as `kill -9` does, and the kernel where memory runs out."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


# --- the story ----------------------------------------------------------------------------------


async def play(program: str, where: Stage) -> bool:
    """Import the file, killing a relay half-way; return whether nothing was lost or doubled."""
    with tempfile.TemporaryFile("w+") as log:
        async with AsyncExitStack() as stack:
            return await _play(stack, program, where, log)


async def _play(stack: AsyncExitStack, program: str, where: Stage, log: IO[str]) -> bool:
    wire = await stack.enter_async_context(Wire.to(where.server.admin_dsn))
    admin = await stack.enter_async_context(connected(where.server.admin_dsn_of(where.database)))
    programs = Programs(program, where, wire, log)
    doomed = await stack.enter_async_context(programs.relay(on_the_wire=True))
    await stack.enter_async_context(programs.relay(on_the_wire=False))
    try:
        with anyio.fail_after(120):
            await until(admin, BOTH_LISTEN, where.database)
            # A transaction takes a fifth of a chunk, and of all of them this relay makes about half.
            gate = wire.hold("COMMIT", "answer", where.chunks)
            job_id = await programs.submit()
            print(f"relay-dispatch durable watch {job_id}", flush=True)
            async with anyio.create_task_group() as group:
                group.start_soon(programs.watch, job_id)
                with anyio.fail_after(30):
                    await gate.reached.wait()
                # Not for longer: then it would give that connection up.
                await until(admin, "select count(*) >= $1 from people", len(where.good) // 2, seconds=1)
                await kill(doomed)
                print(f"  kill -9 {doomed.pid}: a relay, after a COMMIT that it never heard of", flush=True)
    except TimeoutError:
        print(programs.complain(), file=sys.stderr)
        raise
    return await report(admin, where)


async def until(admin: Any, question: str, *arguments: object, seconds: float = 60) -> None:
    """Wait until the answer is yes, and at most so long."""
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        if await admin.fetchval(question, *arguments):
            return
        await anyio.sleep(0.01)


async def report(admin: Any, where: Stage) -> bool:
    """Print what it all came to; return whether it is as promised."""
    stored = [row["row"] for row in await admin.fetch("select row from people")]
    told = [row["row_no"] for row in await admin.fetch("select row_no from relay.durable_row_error")]
    status, done = await admin.fetchrow("select status, chunks_done from relay.durable_job")
    reaped = await admin.fetchval("select count(*) from relay.durable_event where type = 'chunk_reaped'")
    lost = len(where.good - set(stored)) + len(where.bad - set(told))
    doubled = len(stored) - len(set(stored)) + len(told) - len(set(told))
    never = len(set(stored) - where.good) + len(set(told) - where.bad)
    rows = (
        (len(where.good), "good rows in the file", f"{len(stored):,} are in the table"),
        (len(where.bad), "bad rows in the file", f"{len(told):,} are in row_errors"),
        (done, "chunks done", f"taken back from the relay that was killed: {reaped}; the job is {status}"),
    )
    print()
    for count, what, beside in rows:
        print(f"{count:9,}  {what:23} {beside}")
    print(f"\ndone: {len(stored)} rows stored, {len(told)} told of, {lost} lost, {doubled} doubled, {never} invented")
    return not (lost or doubled or never) and done == where.chunks and reaped > 0 and status == "completed_with_errors"


def main(program: str) -> int:
    """Read the arguments, play, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog=Path(program).name,
        description="Import a CSV by two relays, while one of them is killed half-way.",
        epilog="It starts a PostgreSQL server that is thrown away afterwards, or uses that of RELAY_DISPATCH_TEST_DSN "
        "(a superuser's), and takes about ten seconds. Exit code 0 where every good row is stored once and every bad "
        "one told of, else 1. The roles `submit FILE ROWS` and `relay` are what it starts; with RELAY_DISPATCH_DSN and "
        "RELAY_WORKER_DSN they run by themselves too.",
    )
    parser.add_argument("--rows", type=int, default=200_000, metavar="N", help="in the file (%(default)s)")
    parser.add_argument("--chunks", type=int, default=200, metavar="N", help="that it is cut into (%(default)s)")
    options = parser.parse_args()
    if options.chunks < 20 or options.rows < 50 * options.chunks or options.rows % options.chunks:
        parser.error("it takes at least 20 chunks, and for each at least 50 rows, the same number")
    # SIGTERM as Ctrl-C, so that what was started ends too: the event loop has its own way with that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    started = time.perf_counter()
    print(PROLOGUE.format(rows=options.rows, chunks=options.chunks), flush=True)
    try:
        with stage(options.rows, options.chunks) as where:
            good = anyio.run(play, program, where)
    except KeyboardInterrupt:
        print("stopped")
        return 130
    print(f"{time.perf_counter() - started:.0f} s in all")
    return 0 if good else 1
