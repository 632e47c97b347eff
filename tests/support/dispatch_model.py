"""The dispatch room in plain Python: what `tests/test_dispatch_machine.py` plays it against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tests.support.high_counters import nth

Name: TypeAlias = tuple[str, int]
"""A job: its tenant, and a number that jobs of other tenants have too."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What whoever has claimed a job says of it. It may be about no claim that there is."""

    tenant: str
    relay: str
    job: int
    fence: int
    holder: str
    claim: int

    @property
    def name(self) -> Name:
        return self.tenant, self.job


@dataclass
class Result:
    """How a job ended."""

    status: str
    attempt: int
    fence: int
    holder: str | None
    response_status: int | None = None
    body: bytes | None = None
    code: str | None = None
    aged: int | None = None
    """Its place among those that ended an hour ago."""


@dataclass
class Job:
    """One job; `result` is None while it has not ended."""

    relay: str
    body: bytes
    max_attempts: int
    seq: int
    state: Literal["ready", "delayed", "claimed"]
    key: str | None = None
    attempt: int = 0
    fence: int = field(default_factory=lambda: nth(0))
    holder: str | None = None
    claim: int | None = None
    due: int | None = None
    """Its place among the delayed ones that are due; None: they are not, for a long time."""
    lease_over: bool = False
    late: bool = False
    """Its deadline has passed."""
    malformed: bool = False
    result: Result | None = None

    @property
    def shown(self) -> str:
        """The status that everybody is told."""
        if self.result is not None:
            return self.result.status
        if self.late:
            return "expired"
        return "claimed" if self.state == "claimed" else "pending"


@dataclass
class Claimed:
    """What one claim returns."""

    jobs: list[Grant] = field(default_factory=list)
    malformed: list[Grant] = field(default_factory=list)
    expired: list[Name] = field(default_factory=list)
    delayed: set[str] = field(default_factory=set)


class Model:
    """All jobs of some tenants."""

    def __init__(self) -> None:
        self.jobs: dict[Name, Job] = {}
        self.keys: dict[tuple[str, str], tuple[int, tuple[str, bytes, int]]] = {}
        self.locked: Name | None = None
        """A row that somebody else has locked."""
        self._moments = 0

    def moment(self) -> int:
        """Return a number higher than all before."""
        self._moments += 1
        return self._moments

    def live(self, name: Name) -> Job | None:
        """Return the job if it is there and has not ended."""
        job = self.jobs.get(name)
        return None if job is None or job.result is not None else job

    def held(self, grant: Grant) -> Job | None:
        """Return the job if this is its current claim."""
        job = self.live(grant.name)
        if job is None or job.state != "claimed":
            return None
        current = (job.relay, job.fence, job.holder) == (grant.relay, grant.fence, grant.holder)
        return job if current else None

    def ready(self, tenant: str, relay: str) -> int:
        """Return how many jobs can be claimed, as far as the stored state says."""
        return len(self._of(tenant, relay, "ready"))

    # --- gateways -------------------------------------------------------------------------------------

    def enqueue(self, tenant: str, rows: Iterable[tuple[int, Job]]) -> list[bool]:
        """Return of each whether it is new."""
        fresh = []
        for number, job in rows:
            fresh.append((tenant, number) not in self.jobs)
            self.jobs.setdefault((tenant, number), job)
        return fresh

    def enqueue_bounded(self, tenant: str, rows: list[tuple[int, Job, int]], whole: bool) -> list[bool]:
        """Return of each new one, with its bound (0 is none), whether it is refused."""
        ahead = Counter(
            job.relay
            for (owner, _), job in self.jobs.items()
            if owner == tenant and job.result is None and job.state != "claimed"
        )
        refused = []
        for _, job, bound in rows:
            refused.append(0 < bound <= ahead[job.relay])
            ahead[job.relay] += not refused[-1]
        if not whole or not any(refused):
            for (number, job, _), is_refused in zip(rows, refused, strict=True):
                if not is_refused:
                    self.jobs[tenant, number] = job
        return refused

    def enqueue_keyed(self, tenant: str, number: int, job: Job) -> tuple[int, bool] | None:
        """Return the job's number, and whether it was there before; None for a key of another request."""
        assert job.key is not None
        digest = (job.relay, job.body, job.max_attempts)
        known = self.keys.get((tenant, job.key))
        if known is None:
            self.keys[tenant, job.key] = (number, digest)
            self.enqueue(tenant, [(number, job)])
            return number, False
        return (known[0], True) if known[1] == digest else None

    def withdraw(self, name: Name) -> tuple[int, bool]:
        """Return whether this call ended it, and whether somebody was at work on it."""
        job = self.live(name)
        if job is None:
            return 0, False
        was_claimed = job.state == "claimed"
        self._end(job, "expired", None)
        return 1, was_claimed

    def purge(self, tenant: str, limit: int) -> int:
        """Remove the oldest of those that ended long ago."""
        old = [
            (job.result.aged, name)
            for name, job in self.jobs.items()
            if name[0] == tenant and job.result is not None and job.result.aged is not None
        ]
        for _, name in sorted(old)[:limit]:
            del self.jobs[name]
            for key in [key for key, value in self.keys.items() if (key[0], value[0]) == name]:
                del self.keys[key]
        return min(len(old), limit)

    # --- relays ---------------------------------------------------------------------------------------

    def claim(
        self, relay: str, tenants: Sequence[str], limit: int, holder: str, claim: int, after: Sequence[int], start: int
    ) -> Claimed:
        """Take turns, an equal share each, then what is left for whom the share was not enough."""
        found = Claimed()
        left = limit
        full: dict[int, bool] = {}
        for turn in range(2 * len(tenants)):
            place = (start + turn) % len(tenants)
            tenant = tenants[place]
            share = min(max(1, limit // len(tenants)), left)
            quota = share if turn < len(tenants) else left if full.get(place) else 0
            if not quota:
                continue
            if turn < len(tenants):
                self.promote(tenant, relay, limit)
                if self._of(tenant, relay, "delayed"):
                    found.delayed.add(tenant)
            ready = [name for name in self._of(tenant, relay, "ready") if name != self.locked]
            looked_at = [name for name in ready if self.jobs[name].seq > after[place]][:quota]
            for name in looked_at:
                job = self.jobs[name]
                if job.late:
                    self._end(job, "expired", "the deadline passed before a relay had claimed the job")
                    found.expired.append(name)
                    continue
                job.state, job.holder, job.claim, job.lease_over = "claimed", holder, claim, False
                job.attempt += 1
                job.fence += 1
                grant = Grant(tenant, relay, name[1], job.fence, holder, claim)
                (found.malformed if job.malformed else found.jobs).append(grant)
            left -= len(looked_at)
            full[place] = len(looked_at) == quota
        return found

    def _of(self, tenant: str, relay: str, state: str) -> list[Name]:
        """Return the tenant's jobs of a relay in a state, in their order."""
        found = [
            (job.seq, name)
            for name, job in self.jobs.items()
            if name[0] == tenant and job.relay == relay and job.state == state and job.result is None
        ]
        return [name for _, name in sorted(found)]

    def promote(self, tenant: str, relay: str, limit: int) -> None:
        """Let delayed jobs that are due be ready, those first that have been due for longest."""
        due = [(self.jobs[name].due, name) for name in self._of(tenant, relay, "delayed") if name != self.locked]
        for _, name in sorted((at, name) for at, name in due if at is not None)[:limit]:
            self.jobs[name].state, self.jobs[name].due = "ready", None

    def claimed_again(self, relay: str, tenants: Iterable[str], holder: str, claim: int) -> list[Name]:
        return [
            name
            for tenant in tenants
            for name in self._of(tenant, relay, "claimed")
            if (self.jobs[name].holder, self.jobs[name].claim, self.jobs[name].late) == (holder, claim, False)
        ]

    def heartbeat(self, grant: Grant) -> str:
        job = self.held(grant)
        if job is None:
            return "stale"
        if self.locked == grant.name:
            return "busy"
        job.lease_over = False
        return "applied"

    def complete(
        self, grant: Grant, status: str, number: int | None, body: bytes | None, code: str | None
    ) -> tuple[str, str | None]:
        job = self.held(grant)
        if job is not None:
            if job.late:
                self._end(job, "expired", "the deadline passed before the completion", by_holder=True)
                return "stale", "expired"
            self._end(job, status, None, by_holder=True)
            assert job.result is not None
            job.result.response_status, job.result.body, job.result.code = number, body, code
            return "applied", status
        ended = self.jobs.get(grant.name)
        if ended is None or ended.result is None or ended.relay != grant.relay:
            return "stale", None
        result = ended.result
        mine = (result.fence, result.holder) == (grant.fence, grant.holder) and result.status != "expired"
        return "repeated" if mine else "stale", result.status

    def put_back(
        self, grant: Grant, delay: Literal["no", "later", "too late"], give_back: bool, code: str
    ) -> tuple[str, str | None]:
        job = self.held(grant)
        if job is None:
            return "stale", None
        return "applied", self._return(job, delay, give_back, code)

    def _return(self, job: Job, delay: str, give_back: bool, code: str) -> str:
        if (give_back or job.attempt < job.max_attempts) and not job.late and delay != "too late":
            job.attempt -= give_back
            job.fence += 1
            job.state = "delayed" if delay == "later" else "ready"
            job.holder = job.claim = job.due = None
            job.lease_over = False
            return "pending"
        self._end(job, "failed", code)
        assert job.result is not None
        return job.result.status

    # --- sweeps ---------------------------------------------------------------------------------------

    def lost(self, relay: str | None, tenants: Iterable[str]) -> list[Name]:
        """Return the claims that a reclaim may take, by tenant, relay, and age."""
        found = [
            (tenant, job.relay, job.claim, name)
            for tenant in tenants
            for name, job in self.jobs.items()
            if name[0] == tenant and relay in (None, job.relay) and self.live(name) is job and job.lease_over
        ]
        return [name for *_, name in found if name != self.locked]

    def reclaim(self, name: Name) -> str:
        return self._return(self.jobs[name], "no", False, "S2R-LEASE-LOST")

    def expire_late(self, relay: str, tenants: Iterable[str]) -> list[Name]:
        late = [
            name
            for tenant in tenants
            for name, job in self.jobs.items()
            if name[0] == tenant and job.relay == relay and job.late and job.result is None and name != self.locked
        ]
        for name in late:
            self._end(self.jobs[name], "expired", None)
        return late

    def _end(self, job: Job, status: str, code: str | None, *, by_holder: bool = False) -> None:
        """End it; whoever past the deadline ends it, it is expired."""
        if job.late or status == "expired":
            status, code = "expired", "S2R-EXPIRED"
        job.result = Result(status, job.attempt, job.fence if by_holder else job.fence + 1, job.holder, code=code)
