"""All that was told by processes and all that is stored, in memory: what the audit looks at."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from uuid import UUID

import asyncpg

from tests.chaos.rig import Held, Rig, Stop
from tests.chaos.waits import Waits

__all__ = ["Evidence", "Job", "Move", "Name", "Note", "Started", "gather"]

Name: TypeAlias = tuple[str, UUID]
"""Tenant, job."""

_JOBS: Final = """
    select r.tenant_id, r.job_id, r.relay_id, r.operation, r.max_attempts, r.request_body, d.status, d.attempt, d.fence,
           d.claimed_by, d.error_code, d.response_body, d.claimed_at, d.completed_at, r.expires_at,
           q.job_id is not null as queued
    from relay.s2r_relay_dispatch_request r
    left join relay.s2r_relay_dispatch_result d on d.tenant_id = r.tenant_id and d.job_id = r.job_id
    left join relay.s2r_relay_dispatch_queue q on q.tenant_id = r.tenant_id and q.job_id = r.job_id
"""
_IMPORTS: Final = """
    select j.tenant_id, j.job_id, j.status, j.rows_done, j.rows_failed, j.chunks_done, j.chunks_total,
           (select count(*) from chaos.loaded l where l.tenant = j.tenant_id and l.job_id = j.job_id) as stored,
           (select count(distinct row_no) from chaos.loaded l where l.tenant = j.tenant_id and l.job_id = j.job_id)
             as different,
           (select count(*) from relay.durable_row_error e where e.tenant_id = j.tenant_id and e.job_id = j.job_id)
             as bad_rows
    from relay.durable_job j
"""
_MOVES: Final = """
    select m.tenant, m.job_id, m.relay, m.seq, m.was_fence, m.state, m.fence, m.claimed_by, m.claim_id, m.claimed_at,
           m.expires_at, m.began, m.at,
           case when current_setting('track_commit_timestamp')::bool then pg_xact_commit_timestamp(m.xmin) end
    from chaos.moves m
"""

_UNFORESEEN: Final = re.compile("never (retrieved|awaited)|asyncio (ERROR|CRITICAL)|RuntimeWarning|ResourceWarning")
# (A handler of a chunk whose transaction met a fault is logged with its traceback, and is to be.)
_DRIVERS: Final = re.compile(
    r"^.*Future exception was never retrieved\nfuture: <Future finished exception="
    r"ConnectionError\('unexpected connection_lost\(\) call'\)>$",
    re.MULTILINE,
)


@dataclass(slots=True)
class Job:
    """What is stored of one; `status` None where it has not ended."""

    relay: str
    operation: str
    max_attempts: int
    request: bytes
    status: str | None
    attempt: int | None = None
    fence: int | None = None
    claimed_by: str | None = None
    code: str | None = None
    body: bytes | None = None
    claimed_at: float | None = None
    completed_at: float | None = None
    expires_at: float = 0.0
    queued: bool = False


@dataclass(slots=True)
class Note:
    """One entry of the journal."""

    at: float
    process: str
    pid: int
    event: str
    tenant: str
    job_id: UUID | None
    said: dict[str, Any]

    def __str__(self) -> str:
        said = " ".join(f"{name}={value}" for name, value in self.said.items())
        return f"{self.at:.3f} {self.process} ({self.pid}) {self.event} {self.tenant} {self.job_id} {said}"


@dataclass(slots=True)
class Move:
    """One change of a queue row; `state` None where it has gone. Times are of the server's wall clock."""

    tenant: str
    job_id: UUID
    relay: str
    seq: int
    was_fence: int | None
    state: str | None
    fence: int | None
    claimed_by: str | None
    claim_id: UUID | None
    claimed_at: float | None
    expires_at: float
    began: float
    """Its transaction."""
    at: float
    committed: float | None
    """None where the server does not keep it."""


Started: TypeAlias = dict[Name, list[Note]]


@dataclass
class Evidence:
    """One run's."""

    jobs: dict[Name, Job] = field(default_factory=dict)
    ends: list[tuple[str, str, UUID, str]] = field(default_factory=list)
    """What was ever done to a result: verb, tenant, job, status."""
    orders: set[tuple[str, str]] = field(default_factory=set)
    imports: dict[Name, dict[str, Any]] = field(default_factory=dict)
    events_left: int = 0
    notes: dict[str, list[Note]] = field(default_factory=lambda: defaultdict(list))
    """By event."""
    stops: list[Stop] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    """Lines of the processes' logs that tell of what nobody has foreseen."""
    held: list[Held] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    locked: list[tuple[float, float]] = field(default_factory=list)
    """When the rig itself had rows of the queue locked, by the wall clock."""
    disturbed: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """When something was wrong with a process or the way to it, by its name; OURS: with the server."""
    waits: Waits = field(default_factory=Waits)
    wall: float = 0.0
    """Less the monotonic clock."""

    def by_job(self, *events: str) -> Started:
        """Return the notes of some events by job."""
        found: Started = defaultdict(list)
        for event in events:
            for note in self.notes[event]:
                if note.job_id is not None:
                    found[note.tenant, note.job_id].append(note)
        return found

    def moves_by_job(self) -> dict[Name, list[Move]]:
        """Return what became of each queue row, in order: who changes one has it locked."""
        found: dict[Name, list[Move]] = defaultdict(list)
        for move in self.moves:
            found[move.tenant, move.job_id].append(move)
        for moves in found.values():
            moves.sort(key=lambda move: move.at)
        return found

    def history(self, name: Name) -> list[str]:
        """Return all that is known of a job, for people."""
        lines = [str(self.jobs.get(name, "not stored"))]
        notes = [note for some in self.notes.values() for note in some if (note.tenant, note.job_id) == name]
        moves = [
            f"{move.at - self.wall:.3f} {move.state or 'gone'} fence {move.fence} by {move.claimed_by} {move.claim_id}"
            for move in self.moves
            if (move.tenant, move.job_id) == name
        ]
        return [f"{name[0]} {name[1]}", *lines, *map(str, sorted(notes, key=lambda note: note.at)), *moves]


async def gather(rig: Rig) -> Evidence:
    """Read everything, past row security."""
    found = Evidence(
        stops=rig.stops, ended=rig.ended, held=rig.held, locked=rig.locked, waits=rig.waits,
        disturbed=rig.all_disturbed(), wall=time.time() - time.monotonic(),
    )  # fmt: skip
    for member in rig.members.values():
        # The driver forgets a future where it is told to give a connection up that is just being opened.
        lines = _DRIVERS.sub("", member.log.read_text(errors="replace")).splitlines()
        found.logged += [f"{member.name}: {line}" for line in lines if _UNFORESEEN.search(line)]
    conn = await rig.admin()
    async with conn.transaction():
        async for row in conn.cursor(_JOBS, prefetch=5000):
            found.jobs[row["tenant_id"], row["job_id"]] = Job(
                row["relay_id"], row["operation"], row["max_attempts"], row["request_body"], row["status"],
                row["attempt"], row["fence"], row["claimed_by"], row["error_code"], row["response_body"],
                row["claimed_at"] and row["claimed_at"].timestamp(),
                row["completed_at"] and row["completed_at"].timestamp(), row["expires_at"].timestamp(), row["queued"],
            )  # fmt: skip
    found.ends = [tuple(row) for row in await conn.fetch("select verb, tenant, job_id, status from chaos.ends")]
    found.orders = {(row[0], str(row[1])) for row in await conn.fetch("select tenant, id from chaos.orders")}
    found.events_left = await conn.fetchval("select count(*) from relay.outbox")
    found.imports = {(row["tenant_id"], row["job_id"]): dict(row) for row in await conn.fetch(_IMPORTS)}
    async with conn.transaction():
        async for row in conn.cursor(_MOVES, prefetch=5000):
            times = [None if row[n] is None else row[n].timestamp() for n in (9, 10, 11, 12, 13)]
            found.moves.append(Move(*row[:9], *times))
    await conn.close()
    conn = await asyncpg.connect(rig.journal_dsn)
    async with conn.transaction():
        query = "select at, process, pid, event, tenant, job_id, said::text from journal order by n"
        async for row in conn.cursor(query, prefetch=5000):
            found.notes[row[3]].append(Note(row[0], row[1], row[2], row[3], row[4], row[5], json.loads(row[6])))
    await conn.close()
    return found
