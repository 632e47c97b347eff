"""What the durable room does, in plain Python: docs/architecture-durable.md as a program without a database.

One tenant, and one thing at a time but for one transaction of a handler that may be open. A verb returns what its
function in SQL has to answer, and changes what its rows have to hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tests.support.high_counters import nth

OPEN = ("pending", "retry")
ENDS = ("completed", "completed_with_errors", "failed", "cancelled")
LOST = "S2041"
CHUNK_STATES = ("pending", "running", "retry", "done", "failed", "needs_review", "cancelled")
JOB_STATES = ("queued", "running", "paused", "needs_review", *ENDS)

_ON = frozenset({"queued", "running", "paused"})
MAY: dict[str, frozenset[str]] = {
    **{state: (_ON | set(ENDS) | {"needs_review"}) - {state} for state in sorted(_ON)},
    "needs_review": frozenset({*ENDS, "queued", "running"}),
    "failed": frozenset({"queued", "running"}),
    "completed_with_errors": frozenset({"queued", "running"}),
    "completed": frozenset(),
    "cancelled": frozenset(),
}
"""From which status to which a job may be set."""

Fence = tuple[UUID, int, UUID, int]
"""Job, number, token and version, as a lease names its chunk."""


@dataclass
class Chunk:
    """One chunk. `due`: None, "later" or "now", for a retry that waits for its time."""

    rows_total: int
    status: str = "pending"
    attempts: int = 0
    version: int = field(default_factory=lambda: nth(0))
    token: UUID | None = None
    expired: bool = False
    due: str | None = None
    checkpoint: Any = None
    outcome: Any = None
    rows_done: int = 0
    rows_saved: int = 0
    """As the checkpoint has them."""
    rows_failed: int = 0

    @property
    def claimable(self) -> bool:
        return self.status in OPEN and self.due is None

    def move(self, status: str, attempts: str = "keep") -> None:
        """Take it out of anybody's hands; rows that were told after the checkpoint are to be done again."""
        self.status = status
        self.rows_done = self.rows_done if status == "done" else self.rows_saved
        self.version += 1
        self.token = None
        self.expired = False
        self.due = None
        self.attempts = {"keep": self.attempts, "back": max(self.attempts - 1, 0), "reset": 0}[attempts]


@dataclass
class Job:
    """One job, its chunks by number, and what its timeline holds: type and chunk."""

    idempotent: bool
    max_attempts: int
    priority: int
    status: str = "queued"
    started: bool = False
    chunks: dict[int, Chunk] = field(default_factory=dict)
    told: list[tuple[str, int | None]] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    tampered: bool = False
    """Somebody has set statuses by hand, so chunks may still run in it after its end."""

    def count(self) -> dict[str, int]:
        """Return the counters as its chunks are."""
        chunks = self.chunks.values()
        found = {name: sum(c.status == name for c in chunks) for name in CHUNK_STATES}
        return found | {
            "total": len(self.chunks),
            "rows_total": sum(c.rows_total for c in chunks),
            "rows_done": sum(c.rows_done for c in chunks),
            "rows_failed": sum(c.rows_failed for c in chunks),
        }

    def recount(self) -> None:
        self.counted = self.count()

    def has_open(self, *, running: bool = True) -> bool:
        return any(c.status in OPEN or (running and c.status == "running") for c in self.chunks.values())

    def turn_to(self, status: str) -> None:
        self.status = status
        self.started = self.started or status == "running"


@dataclass
class Held:
    """An open transaction of a handler: its chunk is locked, and what it will be if that commits."""

    fence: Fence
    after: dict[str, Any]
    written: list[Any]


class Model:
    """All jobs of a tenant, in the order in which they came to be."""

    def __init__(self) -> None:
        self.jobs: dict[UUID, Job] = {}
        self.held: Held | None = None
        self.written: list[Any] = []
        """What handlers have committed together with a checkpoint or a completion."""
        self.bad_rows: set[tuple[UUID, int, int]] = set()

    def chunk(self, job_id: UUID, seq: int) -> Chunk | None:
        job = self.jobs.get(job_id)
        return None if job is None else job.chunks.get(seq)

    def locked(self, job_id: UUID, seq: int) -> bool:
        return self.held is not None and self.held.fence[:2] == (job_id, seq)

    def runs_under(self, fence: Fence) -> bool:
        """Say whether this is the lease of a running chunk, and has not run out."""
        job_id, seq, token, version = fence
        chunk = self.chunk(job_id, seq)
        return (
            chunk is not None
            and chunk.status == "running"
            and (chunk.token, chunk.version) == (token, version)
            and not chunk.expired
        )

    def has_lease(self, fence: Fence) -> bool:
        """Say whether its holder may write under it: it runs, and its job was not cancelled."""
        return self.runs_under(fence) and self.jobs[fence[0]].status != "cancelled"

    # --- submit -------------------------------------------------------------------------------------

    def submit(self, job_id: UUID, chunks: int, rows: int, *, sealed: bool, **options: Any) -> str:
        """Submit in one transaction, or, where sealed, bit by bit; then one without chunks is at its end."""
        self.jobs[job_id] = job = Job(**options)
        job.told.append(("submitted", None))
        job.recount()
        self.add(job_id, 1, chunks, rows)
        if sealed and not chunks:
            job.turn_to("completed")
            job.told.append(("completed", None))
        return job.status

    def add(self, job_id: UUID, start: int, chunks: int, rows: int) -> int | str:
        job = self.jobs[job_id]
        if job.status not in ("queued", "running", "paused"):
            return "S2042"
        new = [seq for seq in range(start, start + chunks) if seq not in job.chunks]
        for seq in new:
            job.chunks[seq] = Chunk(rows)
        for name, by in (("total", len(new)), ("pending", len(new)), ("rows_total", rows * len(new))):
            job.counted[name] += by
        return len(new)

    # --- claim --------------------------------------------------------------------------------------

    def promote(self) -> None:
        for job in self.jobs.values():
            for chunk in job.chunks.values():
                if chunk.due == "now":
                    chunk.move("retry")

    def claim(self, limit: int, token: UUID, job_id: UUID | None = None) -> list[tuple[UUID, int, int]]:
        """Return job, number and attempt of each, over all jobs or of one."""
        self.promote()
        if job_id is not None:
            return self._take(job_id, limit, token)
        order = list(self.jobs)
        taken: list[tuple[UUID, int, int]] = []
        for some in sorted(self.jobs, key=lambda j: (-self.jobs[j].priority, order.index(j))):
            if len(taken) < limit:
                taken += self._take(some, limit - len(taken), token)
        return taken

    def claim_chunk(self, job_id: UUID, seq: int, version: int, token: UUID) -> list[tuple[UUID, int, int]]:
        chunk = self.chunk(job_id, seq)
        if chunk is None or chunk.status not in OPEN or chunk.version != version or chunk.due == "later":
            return []
        return self._take(job_id, 1, token, only=seq)

    def _take(self, job_id: UUID, limit: int, token: UUID, only: int | None = None) -> list[tuple[UUID, int, int]]:
        job = self.jobs[job_id]
        if job.status not in ("queued", "running"):
            return []
        seqs = [s for s, c in sorted(job.chunks.items()) if c.claimable][:limit] if only is None else [only]
        if not seqs:
            return []
        if job.status == "queued":
            job.turn_to("running")
            job.told.append(("started", None))
        for seq in seqs:
            chunk = job.chunks[seq]
            chunk.move("running")
            chunk.token = token
            chunk.attempts += 1
        job.told.append(("chunk_claimed", seqs[0]))
        return [(job_id, seq, job.chunks[seq].attempts) for seq in seqs]

    # --- holders ------------------------------------------------------------------------------------

    def heartbeat(self, fence: Fence, rows_done: int | None) -> str:
        if not self.has_lease(fence):
            return "stale"
        if self.locked(*fence[:2]):
            return "busy"
        self._write(fence, rows_done=rows_done)
        return "applied"

    def checkpoint(self, fence: Fence, value: Any, rows_done: int | None) -> str | None:
        if not self.has_lease(fence):
            return LOST
        self._write(fence, checkpoint=value, rows_done=rows_done)
        return None

    def complete(
        self, fence: Fence, value: Any, rows_done: int | None, rows_failed: int | None
    ) -> tuple[str, bool] | str:
        job_id, seq, token, version = fence
        chunk = self.chunk(job_id, seq)
        if self.has_lease(fence):
            self._write(fence, status="done", outcome=value, rows_done=rows_done, rows_failed=rows_failed)
            said = "applied"
        elif chunk is not None and chunk.status == "done" and (chunk.token, chunk.version) == (token, version):
            said = "repeated"
        else:
            return LOST
        return said, not self.jobs[job_id].has_open(running=False)

    def _write(self, fence: Fence, **values: Any) -> None:
        chunk = self.chunk(*fence[:2])
        assert chunk is not None
        for name, value in values.items():
            if value is not None:
                setattr(chunk, name, value)
        if "checkpoint" in values:
            chunk.rows_saved = chunk.rows_done

    def hold(self, fence: Fence, after: dict[str, Any], written: list[Any]) -> None:
        """Begin a transaction in which the lease's holder has written these values of its chunk, and these rows."""
        self.held = Held(fence, after, written)

    def let_go(self, *, commit: bool) -> None:
        held = self.held
        assert held is not None
        self.held = None
        if commit:
            self._write(held.fence, **held.after)
            self.written += held.written

    def fail(self, fence: Fence, *, retryable: bool, later: bool) -> str | None:
        if not self.has_lease(fence):
            return None
        job_id, seq = fence[:2]
        job = self.jobs[job_id]
        chunk = job.chunks[seq]
        to = "retry" if retryable and chunk.attempts < job.max_attempts else "failed"
        chunk.move(to)
        chunk.due = "later" if to == "retry" and later else None
        job.told.append(("chunk_retried" if to == "retry" else "chunk_failed", seq))
        return to

    def release(self, fence: Fence, to: str) -> tuple[str, str | None]:
        if not self.runs_under(fence):
            return "stale", None
        job = self.jobs[fence[0]]
        to = "cancelled" if job.status == "cancelled" else to
        job.chunks[fence[1]].move(to, "back")
        return "applied", to

    # --- everybody ----------------------------------------------------------------------------------

    def reap(self, limit: int) -> list[tuple[UUID, int, str]]:
        taken: list[tuple[UUID, int, str]] = []
        for job_id, job in sorted(self.jobs.items()):
            over = [
                seq
                for seq, chunk in sorted(job.chunks.items())
                if chunk.status == "running" and chunk.expired and not self.locked(job_id, seq)
            ][: limit - len(taken)]
            ways = {seq: self._after_loss(job, job.chunks[seq]) for seq in over}
            for to in ("cancelled", "needs_review", "failed", "retry"):
                seqs = [seq for seq in over if ways[seq] == to]
                job.told += [("chunk_reaped", seq) for seq in seqs]
                if to in ("needs_review", "failed"):
                    job.told += [(f"chunk_{to}", seq) for seq in seqs]
                for seq in seqs:
                    job.chunks[seq].move(to)
            taken += [(job_id, seq, ways[seq]) for seq in over]
        return taken

    @staticmethod
    def _after_loss(job: Job, chunk: Chunk) -> str:
        if job.status in ENDS:
            return "cancelled"
        if not job.idempotent:
            return "needs_review"
        return "failed" if chunk.attempts >= job.max_attempts else "retry"

    def finish(self, job_id: UUID) -> tuple[str, bool]:
        job = self.jobs[job_id]
        was = job.status
        if not job.has_open():
            self._conclude(job)
        return job.status, job.status != was

    def finish_lost(self) -> set[UUID]:
        lost = {
            job_id
            for job_id, job in self.jobs.items()
            if job.status in ("queued", "running") and job.counted["total"] > 0 and not job.has_open()
        }
        return {job_id for job_id in lost if self.finish(job_id)[1]}

    def _conclude(self, job: Job) -> None:
        job.recount()
        if job.status in ENDS or job.has_open() or not job.chunks:
            return
        n = job.counted
        if n["needs_review"]:
            status = "needs_review"
        elif n["failed"] and not n["done"]:
            status = "failed"
        elif n["cancelled"] and not n["done"]:
            status = "cancelled"
        else:
            bad = n["failed"] + n["cancelled"] + n["rows_failed"]
            status = "completed_with_errors" if bad else "completed"
        if status != job.status:
            job.turn_to(status)
            job.told.append(("completed" if status == "completed_with_errors" else status, None))

    def set_chunk_statuses(self, job_id: UUID, seqs: Iterable[int], given: Sequence[str], to: str) -> int:
        job = self.jobs[job_id]
        moved = [seq for seq in set(seqs) if seq in job.chunks and job.chunks[seq].status in given]
        for seq in moved:
            job.chunks[seq].move(to)
        job.tampered = True
        return len(moved)

    def set_job_status(self, job_id: UUID, given: Sequence[str], to: str) -> bool:
        job = self.jobs[job_id]
        won = job.status in given and to in MAY[job.status]
        if won:
            job.turn_to(to)
            job.tampered = True
            job.told.append(("note", None))
        return won

    # --- people -------------------------------------------------------------------------------------

    def control(self, job_id: UUID, action: str) -> tuple[str, str, str, int, int]:
        """Return outcome, status before and after, how many chunks were changed, how many still run."""
        job = self.jobs[job_id]
        was = job.status
        outcome, changed = self._decide(job_id, job, action)
        if outcome == "applied":
            news = {"pause": "paused", "resume": "resumed", "cancel": "cancelled", "retry_failed": "retried"}
            job.told.append((news[action], None))
        if outcome == "applied" or changed:
            self._conclude(job)
        return outcome, was, job.status, changed, sum(c.status == "running" for c in job.chunks.values())

    def _decide(self, job_id: UUID, job: Job, action: str) -> tuple[str, int]:
        was = job.status
        on = was in ("queued", "running", "paused")
        if action == "pause" and was in ("queued", "running"):
            job.turn_to("paused")
        elif action == "resume" and was == "paused":
            job.turn_to("running" if job.started else "queued")
        elif action == "cancel" and on:
            job.turn_to("cancelled")
            return "applied", self._sweep(job_id, job, (*OPEN, "running"), "cancelled", "keep")
        elif action == "cancel" and was == "cancelled":
            return "already", self._sweep(job_id, job, OPEN, "cancelled", "keep")
        elif action == "retry_failed" and was == "cancelled":
            return "refused", 0
        elif action == "retry_failed":
            changed = self._sweep(job_id, job, ("failed",), "retry", "reset") if was != "completed" else 0
            if changed and was in ("completed_with_errors", "failed", "needs_review"):
                job.turn_to("running")
            return ("applied" if changed else "already"), changed
        elif (action == "pause" and was == "paused") or (action == "resume" and on):
            return "already", 0
        else:
            return ("too_late" if was in ENDS else "refused"), 0
        return "applied", 0

    def _sweep(self, job_id: UUID, job: Job, given: Sequence[str], to: str, attempts: str) -> int:
        moved = [s for s, c in job.chunks.items() if c.status in given and not self.locked(job_id, s)]
        for seq in moved:
            job.chunks[seq].move(to, attempts)
        return len(moved)

    def resolve(self, job_id: UUID, seq: int, decision: str) -> tuple[str, str | None, str]:
        job = self.jobs[job_id]
        chunk = job.chunks.get(seq)
        if chunk is None:
            return "unknown", None, job.status
        if chunk.status != "needs_review":
            return "too_late", chunk.status, job.status
        if job.status == "cancelled" and decision == "retry":
            return "refused", chunk.status, job.status
        chunk.move(decision, "reset" if decision == "retry" else "keep")
        job.told.append(("resolved", seq))
        if decision == "retry" and job.status not in ("queued", "running", "paused"):
            job.turn_to("running")
        self._conclude(job)
        return "applied", chunk.status, job.status
