"""What gateways and relays may make of jobs, in plain Python: what is so once nothing is under way any more.

Which relay gets which job, and when, is nobody's to say. So handlers tell the model that they begin, and it says
whether they may; what comes of a handler's end is the same whoever ran it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

How = Literal["reply", "reject", "raise", "nonsense", "cancelled", "retry", "retry later", "snooze", "snooze later"]
ENDED = ("succeeded", "failed", "expired")

_CODES: dict[str, str] = {
    "reject": "E-OWN",
    "raise": "S2R-HANDLER-ERROR",
    "nonsense": "S2R-RESULT-INVALID",
    "cancelled": "S2R-HANDLER-CANCELLED",
    "retry": "S2R-RETRY-EXHAUSTED",
    "retry later": "S2R-RETRY-EXHAUSTED",
}


@dataclass(eq=False)
class Play:
    """One call of a handler."""

    token: str
    relay: str
    instance: str
    attempt: int
    fence: int
    over: bool = False
    settles: bool = False
    """Whether it was its answer that ended the job."""


@dataclass(eq=False)
class Job:
    """One job, by the token that its body is: its id may be unknown yet."""

    token: str
    tenant: str
    max_attempts: int
    stubborn: bool
    """Its handler answers where it is cancelled."""
    job_id: UUID | None = None
    status: str = "pending"
    attempt: int = 0
    delayed: bool = False
    late: bool = False
    """Its deadline has passed."""
    current: Play | None = None
    plays: list[Play] = field(default_factory=list)
    body: bytes | None = None
    code: str | None = None
    given_back: int = 0

    @property
    def shown(self) -> str:
        """The status that everybody is told."""
        return "expired" if self.late and self.status not in ENDED else self.status

    @property
    def may_start(self) -> bool:
        return self.status == "pending" and not self.delayed and not self.late


class Model:
    """The jobs of one game, and what was wrong with what handlers told."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.faults: list[str] = []

    def begins(self, token: str, tenant: str, play: Play, max_attempts: int) -> None:
        """Note that a handler begins. What is wrong with that is kept for whoever looks: it is a handler that calls."""
        job = self.jobs.get(token)
        if job is None or job.tenant != tenant:
            self.faults.append(f"{token} of {tenant} was begun: there is no such job")
            return
        was_pending = job.status == "pending" and not job.delayed
        # Claimed just before it was withdrawn, or its deadline passed: its handler may begin before that is known.
        overtaken = job.status == "expired" and job.current is None
        if not (was_pending or overtaken):
            self.faults.append(f"{token} was begun while it was {job.status}, delayed: {job.delayed}")
        if play.attempt != job.attempt + 1 or play.attempt > job.max_attempts or max_attempts != job.max_attempts:
            self.faults.append(f"{token}: attempt {play.attempt} of {max_attempts}, after {job.attempt}")
        if any(other.fence >= play.fence for other in job.plays):
            self.faults.append(f"{token}: fence {play.fence} is not above all before")
        job.plays.append(play)
        job.attempt = play.attempt
        if was_pending:
            job.status, job.current = "claimed", play

    def ends(self, job: Job, play: Play, how: str, body: bytes | None = None) -> None:
        """Note how a handler ends: it counts where the claim is still its own."""
        if job.current is not play:
            return
        job.current = None
        if job.late:
            job.status = "expired"
        elif how == "reply":
            job.status, job.body = "succeeded", body
            play.settles = True
        elif how in ("reject", "nonsense") or (how in _CODES and job.attempt == job.max_attempts):
            job.status, job.code = "failed", _CODES[how]
            play.settles = how != "retry" and how != "retry later"
        else:
            job.status = "pending"
            job.delayed = how.endswith("later")
            if how.startswith("snooze"):
                job.attempt -= 1
                job.given_back += 1

    def withdrawn(self, job: Job) -> int:
        if job.status in ENDED:
            return 0
        job.status, job.current, job.code = "expired", None, None
        return 1

    def taken_back(self, job: Job, code: str) -> None:
        """Note that its claim ended without an answer: the relay stopped, or its lease was lost."""
        job.current = None
        if job.late:
            job.status = "expired"
        elif job.attempt < job.max_attempts:
            job.status = "pending"
        else:
            job.status, job.code = "failed", code
