"""What of a run cannot be: each check names the invariant that it reads out of journal and tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tests.chaos.evidence import Evidence, Name
from tests.chaos.roster import GRACE_SECONDS, SERVES

__all__ = ["CHECKS", "Finding", "audit"]

PATIENCE_SECONDS: Final = 30.0
"""After a deadline, until whoever waits must have been told: longer than any outage of a schedule."""

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
        late = notes[0].at - accepted[name][0].at - accepted[name][0].said["ttl"] if name in accepted else 0.0
        if late > PATIENCE_SECONDS:
            yield f"told {late:.0f} s after the deadline", name
    for event in ("unknown", "never told"):
        for name in e.by_job(event):
            yield f"who waits for it was told: {event}", name


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
    for stop in e.stops:
        if stop.code is None or stop.seconds is None:
            yield f"{stop.process} ({stop.pid}) did not end", None
        elif stop.code != 0 and not stop.disturbed:
            yield f"{stop.process} ({stop.pid}) ended with {stop.code}", None
        elif not stop.disturbed and stop.seconds > GRACE_SECONDS + 3:
            yield f"{stop.process} ({stop.pid}) took {stop.seconds:.1f} s to end", None
        for held in stop.left:
            yield f"{stop.process} ({stop.pid}) is gone, and has still {held}", None
        if stop.disturbed:
            continue
        claimed_by = f":{stop.pid}:"
        for name, job in e.jobs.items():
            late = job.claimed_at is not None and stop.wall + 1.0 < job.claimed_at < stop.wall + 60
            if late and job.claimed_by is not None and claimed_by in job.claimed_by:
                yield f"claimed by {stop.process} after SIGTERM", name


def _no_transaction_is_held(e: Evidence) -> Wrong:
    for line in e.transactions:
        yield line, None


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
    "I4 nobody has a foreign job": _nobody_has_a_foreign_job,
    "I6 callers are told what is stored": _callers_are_told_what_is_stored,
    "I7 relays hold no transaction while they do something else": _no_transaction_is_held,
    "I8 what is rolled back never was": _what_is_rolled_back_never_was,
    "I9 a process that is told to stop does so in order": _stops_are_in_order,
    "one key, one job": _one_job_per_key,
    "who withdraws is told the truth": _who_withdraws_is_told_the_truth,
    "every event becomes one job": _every_event_becomes_one_job,
    "imports are whole": _imports_are_whole,
    "nothing that nobody foresees": _nothing_happened_that_nobody_foresees,
}
