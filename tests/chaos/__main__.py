"""Break everything for some minutes, and audit what came of it: python -m tests.chaos --minutes 10 --seed 7"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import asyncpg

from tests.chaos.audit import CHECKS, Finding, audit
from tests.chaos.evidence import Evidence, gather
from tests.chaos.faults import Faults
from tests.chaos.logs import told
from tests.chaos.order import waiting
from tests.chaos.rig import Rig, rig
from tests.chaos.roster import GATEWAYS, RELAYS
from tests.chaos.schedule import draw

SETTLE_SECONDS = 120.0
"""For the longest deadline to pass, and for what waits for a sweep."""
START_SECONDS = 120.0
"""For every process to be at work, before the first fault: seconds in which it could have run."""
ENOUGH_SECONDS = 600.0
"""Of waiting, whatever the machine is busy with."""
SHOWN = 20
"""Of findings of one kind."""


class Show:
    """What a person sees: a line for each fault, and below them, on a terminal, a line that moves."""

    def __init__(self, rig: Rig, seconds: float) -> None:
        self._rig = rig
        self._seconds = seconds
        self._began = time.monotonic()
        self._moving = sys.stdout.isatty()

    def say(self, line: str) -> None:
        print(f"\r\033[K{line}" if self._moving else line, flush=True)

    async def run(self) -> None:
        """Say how far it is, every second on a terminal and every ten elsewhere."""
        conn = await asyncpg.connect(self._rig.journal_dsn)
        try:
            while True:
                await anyio.sleep(1 if self._moving else 10)
                rows = await conn.fetch("select event, count(*) from journal group by event")
                n: Counter[str] = Counter({row[0]: row[1] for row in rows})
                line = (
                    f"{time.monotonic() - self._began:6.1f} s of {self._seconds:.0f}: {n['accepted']:,} accepted,"
                    f" {n['refused']:,} refused, {n['began']:,} starts, {n['ended']:,} handler ends,"
                    f" {n['told']:,} told, {n['fault']} unforeseen"
                )
                print(f"\r\033[K{line}", end="", flush=True) if self._moving else print(line, flush=True)
        finally:
            conn.terminate()


async def run(seed: int, seconds: float, rate: float, files: Path) -> Evidence:
    """Play the run of a seed, and return what there is to see of it."""
    schedule = draw(seed, seconds)
    async with rig(files, seed, rate) as made:
        show = Show(made, seconds)
        faults = Faults(made, schedule, show.say)
        async with anyio.create_task_group() as group:
            group.start_soon(show.run)
            group.start_soon(made.watch)
            group.start_soon(made.watch_transactions)
            group.start_soon(made.watch_cpu)
            await _all_at_work(made)
            made.all_work()
            began = time.monotonic()
            await faults.run()
            await anyio.sleep(max(0.0, began + seconds - time.monotonic()))
            made.stopping = True
            show.say("the gateways stop, and what is under way comes to its end")
            await _stop(made, GATEWAYS)
            # The next ones send nothing.
            made.rate = 0.0
            for name in GATEWAYS:
                await made.members[name].start()
            made.stopping = False
            await _settle(made)
            made.stopping = True
            await _stop(made, GATEWAYS)
            await _stop(made, RELAYS)
            show.say(f"faults done: {', '.join(f'{kind} {n}' for kind, n in sorted(faults.done.items()))}")
            group.cancel_scope.cancel()
        return await gather(made)


async def _all_at_work(made: Rig) -> None:
    """Wait for it: on a busy machine a run would be over before a process has begun, and nothing wrong found in it."""
    began = time.monotonic()
    conn = await asyncpg.connect(made.journal_dsn)
    try:
        while _least(made, began) < START_SECONDS:
            rows = await conn.fetch("select distinct process from journal where event in ('accepted', 'began')")
            if {row[0] for row in rows} >= {*GATEWAYS, *RELAYS}:
                return
            await anyio.sleep(0.2)
    finally:
        conn.terminate()
    raise SystemExit(f"within {START_SECONDS:.0f} s not every process was at work")


def _least(made: Rig, since: float) -> float:
    """Return the seconds since a moment in which each process could have run; after `ENOUGH_SECONDS` for ever."""
    if time.monotonic() - since > ENOUGH_SECONDS:
        return math.inf
    return min(made.could_run(name, since) for name in made.members)


async def _stop(made: Rig, names: tuple[str, ...]) -> None:
    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(made.members[name].terminate)


async def _settle(made: Rig) -> None:
    """Wait until every job has ended, every event is delivered, and every import is done."""
    began = time.monotonic()
    conn: asyncpg.Connection[Any] = await made.admin()
    try:
        while _least(made, began) < SETTLE_SECONDS:
            left = await conn.fetchval(
                "select (select count(*) from relay.s2r_relay_dispatch_queue) + (select count(*) from relay.outbox)"
                " + (select count(*) from relay.durable_job where status in ('queued', 'running'))"
            )
            if not left:
                return
            await anyio.sleep(0.5)
    finally:
        conn.terminate()


def report(evidence: Evidence, findings: list[Finding], seed: int, seconds: float) -> str:
    """Return what was played, and what of it is wrong."""
    ends = Counter((job.status, job.code) for job in evidence.jobs.values())
    stops = [stop for stop in evidence.stops if stop.seconds is not None and not stop.disturbed]
    slowest = max((stop.seconds or 0.0 for stop in stops), default=0.0)
    n = {event: len(notes) for event, notes in evidence.notes.items()}
    codes = Counter(note.said.get("code") for note in evidence.notes["refused"])
    rows = sum(one["stored"] for one in evidence.imports.values())
    waited = sum(map(len, waiting(evidence).values()))
    claims = len({move.claim_id for move in evidence.moves if move.state == "claimed"})
    processes = ", ".join(f"{name} {evidence.waits.between(name, 0.0, math.inf):.0f}" for name in (*GATEWAYS, *RELAYS))
    accepted, refused, rolled_back = (n.get(event, 0) for event in ("accepted", "refused", "rolled back"))
    lines = [
        "",
        f"jobs        {len(evidence.jobs):,} stored; {accepted:,} accepted, {rolled_back:,} rolled back",
        f"refused     {refused:,}: {', '.join(f'{times:,} {code}' for code, times in codes.most_common())}",
        *(f"            {times:8,} {status} {code or ''}" for (status, code), times in ends.most_common()),
        f"handlers    {n.get('began', 0):,} starts, {n.get('ended', 0):,} ends",
        f"            {n.get('interrupted', 0):,} interrupted; {n.get('stale', 0):,} claims called stale",
        f"claims      {claims:,}, {n.get('cursor', 0):,} with a cursor; {waited:,} times a job was ready for long",
        f"results     {n.get('told', 0):,} told to who waited",
        f"orders      {len(evidence.orders):,} committed with an event each",
        f"imports     {n.get('submitted', 0):,}, of {rows:,} rows",
        f"the rig     {time.process_time():.0f} s of CPU",
        f"            seconds that processes waited for a CPU, the rig's among each: {processes}",
        f"stops       {len(evidence.stops)}; the slowest of {len(stops)} undisturbed ones took {slowest:.1f} s",
        "",
    ]
    by_check = Counter(finding.check for finding in findings)
    for title in CHECKS:
        lines.append(f"{'WRONG' if by_check[title] else 'holds':>5}  {title}")
        mine = [finding for finding in findings if finding.check == title]
        for finding in mine[:SHOWN]:
            lines.append(f"         {finding.what}")
            if finding.name is not None:
                lines += [f"           {line}" for line in evidence.history(finding.name)]
        if len(mine) > SHOWN:
            lines.append(f"         and {len(mine) - SHOWN} more")
    if findings:
        lines += ["", f"the schedule of seed {seed}:", *map(str, draw(seed, seconds))]
        lines.append(f"again: make chaos MINUTES={seconds / 60:g} SEED={seed}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults and load last (10)")
    parser.add_argument("--seed", type=int, help="of faults and load; a new one where none is given, and printed")
    parser.add_argument("--rate", type=float, default=300.0, help="calls of users a second, over all gateways (300)")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this directory")
    parser.add_argument("--show", action="store_true", help="print the schedule, and do nothing")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    seconds = options.minutes * 60
    print(f"seed {seed}: the same again with make chaos MINUTES={options.minutes:g} SEED={seed}", flush=True)
    if options.show:
        print("\n".join(map(str, draw(seed, seconds))))
        return 0
    _heed_signals()
    # A process that has just begun is told nothing yet; it then reads its clock's file itself.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    files = options.logs or Path(tempfile.mkdtemp(prefix="relay-dispatch-chaos-"))
    files.mkdir(parents=True, exist_ok=True)
    is_well = False
    try:
        evidence = anyio.run(run, seed, seconds, options.rate, files)
        findings = audit(evidence)
        print(report(evidence, findings, seed, seconds))
        is_well = not findings
    finally:
        if not is_well:
            # Where it runs for others, this is all that they will see of it.
            print(f"\n{told(files)}\n\nagain: make chaos MINUTES={options.minutes:g} SEED={seed}")
        if options.logs is None:
            shutil.rmtree(files)
    return 0 if is_well else 1


def _heed_signals() -> None:
    """Have SIGTERM end the run as SIGINT does, and heed that also where a shell has had it ignored: nothing is left."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


if __name__ == "__main__":
    sys.exit(main())
