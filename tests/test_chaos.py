"""What `make chaos` stands on: its schedules replay, its clock moves, and its audit finds what is planted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.chaos.audit import CHECKS, audit
from tests.chaos.evidence import Evidence, Job, Move, Note
from tests.chaos.rig import Disturbed, Held, Stop
from tests.chaos.roster import SERVES, TENANTS
from tests.chaos.schedule import CALM_SECONDS, KINDS, draw
from tests.chaos.waits import OURS, Meter, Waits

ONE = UUID(int=1)
NAME = ("acme", ONE)


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert draw(7, 600) == draw(7, 600)
    assert draw(7, 600) != draw(8, 600)


def test_every_kind_of_fault_comes_up_before_one_comes_again() -> None:
    faults = draw(3, 3600)
    for start in range(0, len(faults) - len(KINDS), len(KINDS)):
        assert Counter(one.kind for one in faults[start : start + len(KINDS)]) == Counter(KINDS)
    assert {one.target for one in faults} == {*SERVES, "gateway-0", "gateway-1", "server"}


def test_a_minute_has_most_kinds_and_ends_in_peace() -> None:
    faults = draw(1, 60)
    assert len({one.kind for one in faults}) > len(set(KINDS)) // 2
    assert max(one.at for one in faults) < 54


def test_around_a_stop_that_is_looked_at_nothing_else_is_wrong() -> None:
    faults = draw(5, 3600)
    for n, fault in enumerate(faults):
        if fault.kind == "SIGTERM in calm":
            assert all(one.at + one.seconds + CALM_SECONDS <= fault.at + 0.11 for one in faults[:n])
            assert all(one.at >= fault.at + CALM_SECONDS - 0.11 for one in faults[n + 1 :])


def test_every_tenant_of_a_relay_is_served_by_two_processes() -> None:
    served = Counter((relay, tenant) for relays in SERVES.values() for relay, some in relays.items() for tenant in some)
    assert served == dict.fromkeys(((relay, tenant) for relay in ("erp", "crm") for tenant in TENANTS), 2)


def test_a_processs_wall_clock_moves_and_its_monotonic_clock_does_not(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    program = f"""
import time
true, monotonic = time.time, time.monotonic()
from tests.chaos import clock
clock.install({str(file)!r})
from datetime import UTC, datetime
import os, pathlib, signal
from dispatch_core import migrate, RelayDispatchRepository
import gateway_sdk, relay_sdk
pathlib.Path({str(file)!r}).write_text("+86400")
os.kill(os.getpid(), signal.SIGUSR1)
assert abs(time.time() - true() - 86400) < 5
assert abs(datetime.now(UTC).timestamp() - true() - 86400) < 5
assert abs(time.time_ns() / 1e9 - time.time()) < 5
assert time.monotonic() - monotonic < 60
assert isinstance(datetime.fromtimestamp(0, UTC), datetime)
"""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=root, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_what_a_process_waits_for_a_cpu_is_counted_by_owner_with_the_rigs_own() -> None:
    waits = Waits()
    waits.note(10.0, {"relay-0": 1.0, OURS: 0.5})
    waits.note(11.0, {"relay-0": 1.5, OURS: 0.5, "relay-1": 4.0})
    waits.note(12.0, {"relay-0": 3.0, OURS: 1.5, "relay-1": 4.0})
    assert waits.between("relay-0", 10.0, 11.0) == 0.5
    assert waits.between("relay-0", 11.0, 12.0) == 1.0  # of 2.5: at the same time
    assert waits.between("relay-0", 10.5, 11.5) == 1.5  # what it cannot tell apart it counts
    assert waits.between("gateway-0", 10.0, 99.0) == 1.0
    assert Waits().between("relay-0", 0.0, 9.0) == 0.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count it")
def test_the_meter_reads_what_the_system_counts_and_forgets_nobody_who_has_ended() -> None:
    meter = Meter()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    meter.read({"relay-0": child.pid}, os.getpid())
    before = dict(meter.totals)
    assert before.keys() == {"relay-0", OURS}
    child.communicate(b"\n")
    meter.read({}, None)
    assert meter.totals["relay-0"] == before["relay-0"]


def test_something_is_wrong_for_as_long_as_it_lasts_and_a_while_after() -> None:
    one = Disturbed()
    assert one.disturbed_until == 0.0
    with one.disturbed(after=5):
        assert one.disturbed_until == float("inf")
    ((began, ended),) = one.times
    assert one.disturbed_until == ended
    assert ended - began >= 5


# --- the audit ----------------------------------------------------------------------------------------------------


def note(event: str, at: float = 1.0, *, process: str = "relay-0", job_id: UUID | None = ONE, **said: Any) -> Note:
    return Note(at, process, 77, event, "acme", job_id, said)


def whole() -> Evidence:
    """Return the evidence of a run in which all is well: one job, one order, one import."""
    found = Evidence()
    body = f"acme {ONE} 1 1 erp:vm:77:x".encode()
    found.jobs[NAME] = Job(
        "erp", "Work", 1, b"{}", "succeeded", 1, 1, "erp:vm:77:x", None, body, 100.0, 101.0, 130.0
    )  # fmt: skip
    found.ends.append(("INSERT", *NAME, "succeeded"))
    claim: dict[str, Any] = {"relay": "erp", "fence": 1, "attempt": 1, "instance": "erp:vm:77:x", "sent_for": "acme"}
    told: dict[str, Any] = {"status": "succeeded", "code": None, "attempt": 1, "body": body.decode(), "since": 1.0}
    for one in (
        note("accepted", relay="erp", max_attempts=1, key="k", ttl=30), note("began", **claim), note("ended", **claim),
        note("told", **told), note("order", job_id=None, order="o1", said="committed"),
        note("order", job_id=None, order="o2", said="rolled back"),
        note("stale", fence=1, instance="erp:vm:77:x", verb="heartbeat"),
        Note(1.0, "gateway-0", 5, "submitted", "acme", UUID(int=9), {"rows": 10}),
    ):  # fmt: skip
        found.notes[one.event].append(one)
    found.orders.add(("acme", "o1"))
    order = UUID(int=2)
    found.jobs["acme", order] = Job(
        "erp", "Order", 3, json.dumps({"order": "o1"}).encode(), "expired", 0, 1, None, "S2R-EXPIRED"
    )
    found.imports["acme", UUID(int=9)] = {
        "status": "completed_with_errors", "rows_done": 9, "rows_failed": 1, "stored": 9, "different": 9, "bad_rows": 1,
    }  # fmt: skip
    found.stops.append(Stop("relay-0", 77, 50.0, 200.0, 1.0, 0))
    found.wall = 150.0
    found.moves += [
        move(99.0, "ready", seq=1), move(100.0, "claimed", 0, 1, claimed_by="erp:vm:77:x"), move(101.0, None, 1, seq=1),
    ]  # fmt: skip
    return found


def move(
    at: float, state: str | None, was_fence: int | None = None, fence: int | None = 0, *, job_id: UUID = ONE,
    seq: int = 1, claimed_by: str | None = None, claim_id: UUID | None = None,
) -> Move:  # fmt: skip
    """Return a change that was committed as soon as it was made."""
    claimed_at = at if claim_id else None
    return Move(
        "acme", job_id, "erp", seq, was_fence, state, fence, claimed_by, claim_id, claimed_at, 500.0, at, at, at
    )


def die_of_sigterm(e: Evidence) -> None:
    e.stops[0].code = -15


def lose(e: Evidence) -> None:
    del e.jobs[NAME]


def leave(e: Evidence) -> None:
    e.jobs[NAME] = replace(e.jobs[NAME], status=None, queued=True)


def write_twice(e: Evidence) -> None:
    e.ends.append(("UPDATE", *NAME, "failed"))


def start_twice(e: Evidence) -> None:
    e.notes["began"].append(replace(e.notes["began"][0], said={**e.notes["began"][0].said, "fence": 3}))


def start_one_claim_twice(e: Evidence) -> None:
    e.jobs[NAME].max_attempts = 3
    e.notes["began"].append(e.notes["began"][0])


def count_what_nobody_did(e: Evidence) -> None:
    e.notes["ended"].clear()


def count_anothers_answer(e: Evidence) -> None:
    e.jobs[NAME].fence = 2


def give_to_a_stranger(e: Evidence) -> None:
    e.notes["began"][0].process = "relay-2"


def mix_tenants_up(e: Evidence) -> None:
    e.notes["began"][0].said["sent_for"] = "beta"


def lie(e: Evidence) -> None:
    e.notes["told"][0].said["status"] = "expired"


def step_over(e: Evidence) -> None:
    """A job is ready from 100 to 106; at 103 and at 104.5 claims take later ones."""
    waits = UUID(int=20)
    e.moves += [move(100.0, "ready", job_id=waits, seq=5), move(106.0, "claimed", 0, 1, job_id=waits, seq=5)]
    for n, at in enumerate((103.0, 104.5), 30):
        e.moves.append(move(at, "claimed", 0, 1, job_id=UUID(int=n), seq=n, claim_id=UUID(int=n + 100)))


def refuse_a_valid_claim(e: Evidence) -> None:
    e.moves[-1].at = 152.0
    e.notes["stale"][0].at = 1.5


def tell_late(e: Evidence) -> None:
    e.notes["told"][0].at = 7.0


def tell_after_the_deadline(e: Evidence) -> None:
    e.notes["told"][0].at = 62.0


def never_tell(e: Evidence) -> None:
    e.notes["never told"].append(note("never told", 91.0))


def hold(e: Evidence) -> None:
    e.held.append(Held("relay-0", 60.0, 9.0, "select 1"))


def claim_what_was_rolled_back(e: Evidence) -> None:
    for event in ("rolled back", "began"):
        e.notes[event].append(replace(e.notes["began"][0], job_id=UUID(int=5)))


def interrupt_at_once(e: Evidence) -> None:
    e.notes["interrupted"].append(replace(e.notes["began"][0], at=50.5, job_id=UUID(int=5)))


def give_up_at_once(e: Evidence) -> None:
    e.notes["began"].append(replace(e.notes["began"][0], job_id=UUID(int=5), at=49.0))
    e.moves.append(move(200.2, "ready", 1, 2, job_id=UUID(int=5)))


def keep_what_was_rolled_back(e: Evidence) -> None:
    e.notes["rolled back"].append(note("rolled back"))


def dawdle(e: Evidence) -> None:
    e.stops[0].seconds = 9.0


def claim_after_sigterm(e: Evidence) -> None:
    e.jobs[NAME].claimed_at = 203.0


def stop_with_work(e: Evidence) -> None:
    e.stops[0].left.append("acme 1")


def use_a_key_twice(e: Evidence) -> None:
    e.jobs["acme", UUID(int=3)] = e.jobs["acme", UUID(int=2)]
    e.notes["accepted"].append(replace(e.notes["accepted"][0], job_id=UUID(int=3)))


def ignore_a_withdrawal(e: Evidence) -> None:
    e.notes["withdrawal"].append(note("withdrawal", said=1))


def lose_an_event(e: Evidence) -> None:
    del e.jobs["acme", UUID(int=2)]


def deliver_twice(e: Evidence) -> None:
    e.jobs["acme", UUID(int=4)] = e.jobs["acme", UUID(int=2)]


def load_twice(e: Evidence) -> None:
    e.imports["acme", UUID(int=9)]["stored"] = 18


def crash(e: Evidence) -> None:
    e.ended.append("relay-0 (pid 77) ended by itself with 1")


PLANTED: dict[Any, str] = {
    lose: "I1 nothing", leave: "I1 every", write_twice: "I1 no end", start_twice: "I2", start_one_claim_twice: "I2",
    count_what_nobody_did: "I3", count_anothers_answer: "I3", give_to_a_stranger: "I4", mix_tenants_up: "I4",
    step_over: "I5", refuse_a_valid_claim: "I3 no valid", tell_late: "I6 callers are told soon",
    tell_after_the_deadline: "I6 callers are told what", never_tell: "I6 callers are told what",
    die_of_sigterm: "I9", claim_what_was_rolled_back: "I8", interrupt_at_once: "I9", give_up_at_once: "I9",
    lie: "I6 callers are told what", hold: "I7", keep_what_was_rolled_back: "I8", dawdle: "I9",
    claim_after_sigterm: "I9",
    stop_with_work: "I9", use_a_key_twice: "one key", ignore_a_withdrawal: "who withdraws",
    lose_an_event: "every event", deliver_twice: "every event", load_twice: "imports", crash: "nothing that",
}  # fmt: skip


def test_the_audit_of_a_run_in_which_all_is_well_finds_nothing() -> None:
    assert audit(whole()) == []


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_audit_finds_what_is_planted(plant: Any) -> None:
    evidence = whole()
    plant(evidence)
    assert any(finding.check.startswith(PLANTED[plant]) for finding in audit(evidence))


def test_every_check_has_something_planted_for_it() -> None:
    assert all(any(title.startswith(start) for start in PLANTED.values()) for title in CHECKS)


def above_its_cursor(e: Evidence) -> None:
    for one in (UUID(int=130), UUID(int=131)):
        e.notes["cursor"].append(Note(1.0, "relay-0", 77, "cursor", "", one, {"after": {"acme": 5}}))


def not_committed_yet(e: Evidence) -> None:
    e.moves[3].committed = 102.0


def locked_by_its_next_transaction(e: Evidence) -> None:
    e.moves[4].began = 103.0


def locked_by_the_rig(e: Evidence) -> None:
    e.locked.append((103.5, 104.6))


def past_its_deadline(e: Evidence) -> None:
    e.moves[3].expires_at = 104.0


def later_than_all_that_were_taken(e: Evidence) -> None:
    for one in e.moves[3:5]:
        one.seq = 50


@pytest.mark.parametrize(
    "reason",
    [
        above_its_cursor, not_committed_yet, locked_by_its_next_transaction, locked_by_the_rig, past_its_deadline,
        later_than_all_that_were_taken,
    ],
    ids=lambda reason: reason.__name__,
)  # fmt: skip
def test_a_claim_may_step_over_a_job_for_a_reason(reason: Callable[[Evidence], None]) -> None:
    evidence = whole()
    step_over(evidence)
    reason(evidence)
    assert not [one for one in audit(evidence) if one.check.startswith("I5")]


def without_a_cpu(e: Evidence) -> None:
    e.waits.note(0.0, {})
    for at in range(100):
        e.waits.note(float(at), {"relay-0": at * 0.9})


def while_the_server_was_away(e: Evidence) -> None:
    e.disturbed[OURS] = [(0.0, 3.0)]


def while_its_gateway_was_stopped(e: Evidence) -> None:
    e.disturbed["relay-0"] = [(3.0, 4.0), (5.0, 6.0)]


def while_its_gateway_was_refused_everything(e: Evidence) -> None:
    e.notes["refused"].append(note("refused", 4.0))


@pytest.mark.parametrize(
    ("plant", "excuse"),
    [
        (tell_late, without_a_cpu), (never_tell, without_a_cpu), (dawdle, without_a_cpu), (hold, without_a_cpu),
        (interrupt_at_once, without_a_cpu), (tell_late, while_the_server_was_away),
        (tell_late, while_its_gateway_was_stopped), (tell_late, while_its_gateway_was_refused_everything),
    ],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_a_process_is_held_only_to_the_time_in_which_it_could_run_and_nothing_was_wrong(
    plant: Callable[[Evidence], None], excuse: Callable[[Evidence], None]
) -> None:
    evidence = whole()
    plant(evidence)
    assert audit(evidence)
    excuse(evidence)
    assert audit(evidence) == []
