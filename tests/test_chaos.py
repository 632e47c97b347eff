"""What `make chaos` stands on: its schedules replay, its clock moves, and its audit finds what is planted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.chaos.audit import CHECKS, audit
from tests.chaos.evidence import Evidence, Job, Note
from tests.chaos.rig import Stop
from tests.chaos.roster import SERVES, TENANTS
from tests.chaos.schedule import CALM_SECONDS, KINDS, draw

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
    told: dict[str, Any] = {"status": "succeeded", "code": None, "attempt": 1, "body": body.decode()}
    for one in (
        note("accepted", relay="erp", max_attempts=1, key="k", ttl=30), note("began", **claim), note("ended", **claim),
        note("told", **told), note("order", job_id=None, order="o1", said="committed"),
        note("order", job_id=None, order="o2", said="rolled back"),
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
    return found


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


def hold(e: Evidence) -> None:
    e.transactions.append("relay-0: 9.0 s idle")


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
    lie: "I6", hold: "I7", keep_what_was_rolled_back: "I8", dawdle: "I9", claim_after_sigterm: "I9",
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
