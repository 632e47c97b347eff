"""What of a run cannot be: each check names the invariant that it reads out of journal and tables."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tests.chaos.evidence import Evidence, Move, Name, Note
from tests.chaos.order import stepped_over
from tests.chaos.rig import IDLE_SECONDS, Stop
from tests.chaos.roster import GRACE_SECONDS, LEASE_SECONDS, SERVES
from tests.chaos.waits import OURS

__all__ = ["CHECKS", "Finding", "audit"]

PATIENCE_SECONDS: Final = 30.0
"""After a deadline, until whoever waits must have been told: longer than any outage of a schedule."""

TELL_SECONDS: Final = 5.0
"""From a result until who waits for it is told, while nothing is wrong: a poll each second, and what that takes."""
CLOCKS_SECONDS: Final = 0.2
"""By which the wall clock may have moved against the monotonic one."""
REFUSAL_SECONDS: Final = 5.0
"""Before a call of a gateway is refused, and so in which that gateway may have no connection for its polls either."""

RETRYABLE: Final = {
    None, "S2R-DATABASE-UNAVAILABLE", "S2R-CONNECTION-LOST", "S2R-DATABASE-BUSY", "S2R-CLIENT-CLOSED",
}  # fmt: skip

CODES: Final[dict[str, set[str | None]]] = {
    "succeeded": {None},
    "failed": {"E-NO", "S2R-LEASE-LOST", "S2R-RELAY-STOPPED", "S2R-RETRY-EXHAUSTED"},
    "expired": {"S2R-EXPIRED"},
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that cannot be; `name` is the job that it is about, where it is about one."""

    check: str
    what: str
    name: Name | None = None


def audit(evidence: Evidence) -> list[Finding]:
    """Return all that is wrong."""
    return [Finding(title, what, name) for title, check in CHECKS.items() for what, name in check(evidence)]


Wrong = Iterator[tuple[str, Name | None]]


def _nothing_is_lost(e: Evidence) -> Wrong:
    for name in e.by_job("accepted"):
        if name not in e.jobs:
            yield "accepted, and not stored", name


def _everything_ends(e: Evidence) -> Wrong:
    for name, job in e.jobs.items():
        if job.status is None:
            yield ("in the queue for ever" if job.queued else "neither queued nor ended"), name
        elif job.queued:
            yield "ended, and queued", name
        elif job.code not in CODES[job.status]:
            yield f"{job.status} with {job.code}", name


def _nothing_ends_twice(e: Evidence) -> Wrong:
    ends = Counter((tenant, job_id) for _, tenant, job_id, _ in e.ends)
    for name, count in ends.items():
        if count > 1:
            yield f"its end was written {count} times", name
    for verb, tenant, job_id, _ in e.ends:
        if verb != "INSERT":
            yield f"an end met {verb}", (tenant, job_id)


def _no_handler_starts_too_often(e: Evidence) -> Wrong:
    naps = Counter((note.tenant, note.job_id) for note in e.notes["snoozed"])
    for name, starts in e.by_job("began").items():
        job = e.jobs.get(name)
        if job is not None and len(starts) - naps[name] > job.max_attempts:
            yield f"started {len(starts)} times, {naps[name]} of them naps, of {job.max_attempts}", name
        if job is not None and (job.attempt or 0) > job.max_attempts:
            yield f"attempt {job.attempt} of {job.max_attempts}", name
        fences = [note.said["fence"] for note in starts]
        if len(set(fences)) < len(fences):
            yield "one claim started two handlers", name


def _what_counts_was_done_by_the_claim_it_names(e: Evidence) -> Wrong:
    ended = {(note.tenant, note.job_id, note.said["fence"], note.said["instance"]) for note in e.notes["ended"]}
    for name, job in e.jobs.items():
        if job.status == "succeeded" or job.code == "E-NO":
            if (*name, job.fence, job.claimed_by) not in ended:
                yield "the handler of this claim has not ended", name
            said = f"{name[0]} {name[1]} {job.attempt} {job.fence} {job.claimed_by}"
            if job.status == "succeeded" and job.body != said.encode():
                yield f"another's answer: {job.body!r}", name
            if job.completed_at is not None and job.completed_at >= job.expires_at:
                yield "completed past its deadline", name


def _no_valid_claim_is_refused(e: Evidence) -> Wrong:
    """What the database called stale had been taken away by then: to have waited for a lock is no reason."""
    moves = e.moves_by_job()
    for note in e.notes["stale"]:
        assert note.job_id is not None
        name = (note.tenant, note.job_id)
        fence, instance = note.said["fence"], note.said["instance"]
        of_job = moves.get(name, [])
        claimed = any((move.fence, move.claimed_by) == (fence, instance) for move in of_job)
        if claimed and not _ended_by(of_job, fence, note.at + e.wall):
            yield f"{note.said['verb']} of the current claim was refused: {note}", name


def _callers_are_told_soon(e: Evidence) -> Wrong:
    refusals: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for event in ("refused", "withdrawal unknown"):
        for note in e.notes[event]:
            refusals.setdefault((note.process, note.pid), []).append((note.at - REFUSAL_SECONDS, note.at + 1.0))
    for note in e.notes["told"]:
        assert note.job_id is not None
        job = e.jobs.get((note.tenant, note.job_id))
        if job is None or job.completed_at is None:
            continue
        began = max(note.said["since"], job.completed_at - e.wall)
        if note.at - began <= TELL_SECONDS:
            continue
        wrong = [
            *e.disturbed.get(OURS, ()), *e.disturbed.get(note.process, ()), *refusals.get((note.process, note.pid), ()),
        ]  # fmt: skip
        for since, until in _calm(began, note.at, wrong):
            seconds = until - since - e.waits.between(note.process, since, until)
            if seconds > TELL_SECONDS:
                yield f"told {note.at - began:.1f} s after its end, {seconds:.1f} s of calm among them: {note}", (
                    note.tenant, note.job_id,
                )  # fmt: skip
                break


def _calm(since: float, until: float, wrong: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Return what is left between two moments where nothing was wrong."""
    for began, ended in sorted(wrong):
        if ended <= since:
            continue
        if began >= until:
            break
        if began > since:
            yield since, began
        since = max(since, ended)
    if since < until:
        yield since, until


def _callers_are_told_what_is_stored(e: Evidence) -> Wrong:
    for note in e.notes["told"]:
        assert note.job_id is not None
        name = (note.tenant, note.job_id)
        job = e.jobs.get(name)
        if job is None:
            yield "told the result of what is not stored", name
            continue
        body = None if job.body is None else job.body.decode()
        told = tuple(note.said[word] for word in ("status", "code", "attempt", "body"))
        if told != (job.status, job.code, job.attempt, body):
            yield f"told {note.said}", name
    accepted = e.by_job("accepted")
    for name, notes in e.by_job("told").items():
        if name in accepted and _is_late(e, accepted[name][0], notes[0]):
            yield f"told {notes[0].at - accepted[name][0].at:.0f} s after it was accepted", name
    for name, notes in e.by_job("never told").items():
        if name not in accepted or _is_late(e, accepted[name][0], notes[0]):
            yield "who waits for it was never told", name
    for name in e.by_job("unknown"):
        yield "who waits for it was told that it is unknown", name


def _is_late(e: Evidence, accepted: Note, told: Note) -> bool:
    deadline = accepted.at + accepted.said["ttl"]
    return told.at - deadline - e.waits.between(told.process, deadline, told.at) > PATIENCE_SECONDS


def _nobody_has_a_foreign_job(e: Evidence) -> Wrong:
    for note in e.notes["began"]:
        assert note.job_id is not None
        name = (note.tenant, note.job_id)
        relay = note.said["relay"]
        if note.tenant not in SERVES[note.process].get(relay, ()) or note.said["sent_for"] != note.tenant:
            yield f"a foreign job: {note}", name
        job = e.jobs.get(name)
        if job is not None and job.relay != relay:
            yield f"another relay's job: {note}", name


def _what_is_rolled_back_never_was(e: Evidence) -> Wrong:
    for name in e.by_job("rolled back"):
        if name in e.jobs:
            yield "rolled back, and stored", name
    rolled_back = e.by_job("rolled back").keys()
    for event in ("began", "ended", "told"):
        for name in e.by_job(event).keys() & rolled_back:
            yield f"rolled back, and yet: {event}", name
    for note in e.notes["order"]:
        key = (note.tenant, note.said["order"])
        if note.said["said"] == "rolled back" and key in e.orders:
            yield f"order {key} was rolled back", None
        if note.said["said"] == "committed" and key not in e.orders:
            yield f"order {key} was committed, and is gone", None


def _every_event_becomes_one_job(e: Evidence) -> Wrong:
    if e.events_left:
        yield f"{e.events_left} events were not delivered", None
    delivered: Counter[tuple[str, str]] = Counter()
    for name, job in e.jobs.items():
        if job.operation == "Order":
            delivered[name[0], json.loads(job.request)["order"]] += 1
    for order in e.orders - delivered.keys():
        yield f"order {order} has no job", None
    for order, count in delivered.items():
        if order not in e.orders:
            yield f"order {order} was rolled back and delivered", None
        if count > 1:
            yield f"order {order} was delivered {count} times", None


def _one_job_per_key(e: Evidence) -> Wrong:
    jobs: dict[tuple[str, str], set[Name]] = {}
    for note in e.notes["accepted"]:
        if note.said["key"] is not None and note.job_id is not None:
            jobs.setdefault((note.tenant, note.said["key"]), set()).add((note.tenant, note.job_id))
    for key, names in jobs.items():
        if len(names) > 1:
            yield f"key {key} stands for {sorted(names)}", None


def _who_withdraws_is_told_the_truth(e: Evidence) -> Wrong:
    for name, notes in e.by_job("withdrawal").items():
        job = e.jobs.get(name)
        if job is not None and notes[0].said["said"] == 1 and job.status != "expired":
            yield "withdrawn, and not expired", name


def _imports_are_whole(e: Evidence) -> Wrong:
    for name, notes in e.by_job("submitted").items():
        found, rows = e.imports.get(name), notes[0].said["rows"]
        good = rows - rows // 10
        if found is None:
            yield "an import was accepted, and is gone", name
        elif (found["status"], found["rows_done"], found["rows_failed"]) != ("completed_with_errors", good, rows // 10):
            yield f"an import: {found}", name
        elif (found["stored"], found["different"], found["bad_rows"]) != (good, good, rows // 10):
            yield f"rows of an import: {found}", name
    for name, found in e.imports.items():
        if found["stored"] != found["different"]:
            yield f"rows twice: {found}", name


def _stops_are_in_order(e: Evidence) -> Wrong:
    works: dict[int, float] = {}
    for event in ("works", "began"):
        for note in e.notes[event]:
            works.setdefault(note.pid, note.at)
    for stop in e.stops:
        if stop.code == -signal.SIGTERM and works.get(stop.pid, stop.at) >= stop.at:
            continue  # it had not come so far as to look out for signals
        if stop.code is None or stop.seconds is None:
            yield f"{stop.process} ({stop.pid}) did not end", None
        elif stop.code != 0 and not stop.disturbed:
            yield f"{stop.process} ({stop.pid}) ended with {stop.code}", None
        elif not stop.disturbed and stop.seconds - _waited(e, stop) > GRACE_SECONDS + 3:
            yield f"{stop.process} ({stop.pid}) took {stop.seconds:.1f} s to end", None
        for held in stop.left:
            yield f"{stop.process} ({stop.pid}) is gone, and has still {held}", None
        if stop.disturbed:
            continue
        claimed_by = f":{stop.pid}:"
        for name, job in e.jobs.items():
            if job.claimed_at is None or job.claimed_by is None or claimed_by not in job.claimed_by:
                continue
            after = job.claimed_at - stop.wall
            if 1.0 < after < 60 and after - e.waits.between(stop.process, stop.at, stop.at + after) > 1.0:
                yield f"claimed by {stop.process} after SIGTERM", name
        yield from _handlers_have_no_grace(e, stop)


def _waited(e: Evidence, stop: Stop) -> float:
    return e.waits.between(stop.process, stop.at, stop.at + (stop.seconds or 0.0))


def _handlers_have_no_grace(e: Evidence, stop: Stop) -> Wrong:
    """Find handlers that were interrupted, and claims that were given up, before the grace was over."""
    moves = e.moves_by_job()
    if e.waits.between(stop.process, stop.at - LEASE_SECONDS, stop.at + GRACE_SECONDS) > LEASE_SECONDS * 2 / 3:
        return  # a lease, renewed at each third of it, may be lost for want of a CPU: that interrupts a handler at once
    for note in e.notes["interrupted"]:
        assert note.job_id is not None
        name = (note.tenant, note.job_id)
        after = note.at - stop.at
        if note.pid == stop.pid and 0 <= after < GRACE_SECONDS - 0.1:
            # So is one whose job was withdrawn or is late.
            job = e.jobs.get(name)
            late = job is not None and job.expires_at < note.at + e.wall + 0.5
            if not late and not _ended_by(moves.get(name, []), note.said["fence"], note.at + e.wall):
                yield f"{stop.process} ({stop.pid}) interrupted a handler {after:.1f} s after SIGTERM", name
    over = {
        (note.tenant, note.job_id, note.said["fence"])
        for event in ("ended", "put back", "snoozed")
        for note in e.notes[event]
        if note.pid == stop.pid
    }
    for note in e.notes["began"]:
        if note.pid != stop.pid or note.at > stop.at or (note.tenant, note.job_id, note.said["fence"]) in over:
            continue
        assert note.job_id is not None
        name = (note.tenant, note.job_id)
        job = e.jobs.get(name)
        for move in moves.get(name, []):
            given_up = move.state is not None or (job is not None and job.code == "S2R-RELAY-STOPPED")
            after = move.at - stop.wall
            if given_up and move.was_fence == note.said["fence"] and 0 <= after < GRACE_SECONDS - 0.1:
                yield f"{stop.process} ({stop.pid}) gave up what it ran {after:.1f} s after SIGTERM", name


def _ended_by(moves: list[Move], fence: int, moment: float) -> bool:
    # The two clocks are read one after the other, at the end of the run.
    return any(move.was_fence == fence and move.at <= moment + CLOCKS_SECONDS for move in moves)


def _no_transaction_is_held(e: Evidence) -> Wrong:
    for one in e.held:
        seconds = one.seconds - e.waits.between(one.process, one.at - one.seconds, one.at)
        if seconds > IDLE_SECONDS:
            yield f"{one.process}: {one.seconds:.1f} s idle in a transaction after {one.query}", None


def _nothing_happened_that_nobody_foresees(e: Evidence) -> Wrong:
    for note in e.notes["fault"]:
        yield str(note), None
    for note in e.notes["refused"]:
        if note.said.get("code") not in RETRYABLE:
            yield str(note), None
    for line in (*e.ended, *e.logged):
        yield line, None


CHECKS: Final[dict[str, Callable[[Evidence], Wrong]]] = {
    "I1 nothing accepted is lost": _nothing_is_lost,
    "I1 every job ends": _everything_ends,
    "I1 no end is written twice": _nothing_ends_twice,
    "I2 no handler starts more often than its sender allowed": _no_handler_starts_too_often,
    "I3 what counts was done by the claim that it names": _what_counts_was_done_by_the_claim_it_names,
    "I3 no valid claim is refused": _no_valid_claim_is_refused,
    "I4 nobody has a foreign job": _nobody_has_a_foreign_job,
    "I5 no claim steps over what is ready": stepped_over,
    "I6 callers are told what is stored": _callers_are_told_what_is_stored,
    "I6 callers are told soon": _callers_are_told_soon,
    "I7 nobody holds a transaction while he does something else": _no_transaction_is_held,
    "I8 what is rolled back never was": _what_is_rolled_back_never_was,
    "I9 a process that is told to stop does so in order": _stops_are_in_order,
    "one key, one job": _one_job_per_key,
    "who withdraws is told the truth": _who_withdraws_is_told_the_truth,
    "every event becomes one job": _every_event_becomes_one_job,
    "imports are whole": _imports_are_whole,
    "nothing that nobody foresees": _nothing_happened_that_nobody_foresees,
}
