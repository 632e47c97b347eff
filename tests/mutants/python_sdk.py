"""Mutants of the SDKs and what they share, for tests/test_sdk_machine.py where no test is named."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant

_HINT = "a ring is a hint: heartbeats and polls find out too, only later"

_ends = partial(Mutant, "relay_sdk/ends.py")
_executor = partial(Mutant, "relay_sdk/executor.py")
_heartbeat = partial(Mutant, "relay_sdk/heartbeat.py")
_claimer = partial(Mutant, "relay_sdk/claimer.py")
_completer = partial(Mutant, "relay_sdk/completer.py")
_tenant = partial(Mutant, "gateway_sdk/tenant.py")
_withdrawals = partial(Mutant, "gateway_sdk/lane_expire.py")
_waiter = partial(Mutant, "gateway_sdk/waiter.py")
_cursor = partial(Mutant, "dispatch_core/cursor.py")
_batcher = partial(Mutant, "dispatch_core/batcher.py")

_ZERO = "test_relay_cursor.py::test_while_claims_come_back_full_the_cursor_trails_them_and_zero_comes_once_a_second"

MUTANTS = [
    # --- the relay
    _ends("def returned", "Retry gives the attempt back", "delay, isinstance(outcome, Snooze),", "delay, True,"),
    _ends("def returned", "Snooze does not", "delay, isinstance(outcome, Snooze),", "delay, False,"),
    _ends(
        "def returned",
        "who has lost the claim writes all the same",
        "        if slot.cause is Cause.LOST:\n            return None\n",
        "",
        equivalent="the database refuses it, by its fence",
    ),
    _ends("def _error", "an error is no reason for another attempt", "again = not job.last_attempt", "again = False"),
    _ends("def released", "what was interrupted gets its attempt back", "slot.state is RUNNING", "False"),
    _ends("def raised", "a relay that stops fails what it interrupts", "return self.released(slot)", "pass"),
    _executor("def cancel(", "a cancelled handler goes on", "slot.task.cancel()", "pass"),
    _executor("def accept", "jobs take no slot", "self._slots.take_all(jobs)", "pass"),
    _executor("def settled_all", "a slot is never free again", "self._slots.give_all(free)", "pass"),
    _heartbeat("async def _renew(", "stale is no reason to stop", "self._cancel(slot, Cause.LOST)", "pass"),
    _heartbeat("def ask", "a withdrawal is not asked about", "self._asked.update(job_ids)", "", equivalent=_HINT),
    _claimer(
        "def _next_turn", "one job more than there are slots", "self._slots.free - self", "1 + self._slots.free - self"
    ),
    _claimer("async def _claim(", "claims are the relay's, and no instance's", "=self._instance_id", "=self._relay_id"),
    _claimer("def stop(", "it goes on claiming", "self._stopping = True", "pass"),
    _completer("async def _complete(", "completions of any instance", "=self._instance_id", "=self._relay_id"),
    _completer("async def _retry(", "what is put back is completed", ".retry(", ".complete_many("),
    _completer(
        "def _were_completed",
        "nobody is told of a result",
        "self._doorbell.ring_many_results(tenant, job_ids)",
        "pass",
        equivalent=_HINT,
    ),
    # --- the gateway
    _tenant("async def enqueue(", "not in the caller's transaction", "if conn is not None", "if False"),
    _tenant("async def enqueue(", "the key is left out", "if row.idempotency_key is not None", "if False"),
    _tenant("async def poll_status", "any tenant is asked for", "lanes.poll[self._tenant]", 'lanes.poll["a"]'),
    _tenant("async def mark_expired", "any tenant's is withdrawn", "lanes.expire[self._tenant]", 'lanes.expire["a"]'),
    _withdrawals("async def _send(", "always withdrawn", "1 if job_id in withdrawn else 0", "1"),
    _withdrawals("async def _send(", "withdrawn twice", "withdrawn.discard(job_id)", "pass"),
    _withdrawals(
        "async def _send(",
        "no handler is told of a withdrawal",
        "self._doorbell.ring_cancel(tenant, job.relay_id, job.job_id)",
        "pass",
        equivalent=_HINT,
    ),
    _waiter(
        "def on_timed_out", "whose time is over has a result", "outcome = WaitTimeoutError", "outcome = UnknownJobError"
    ),
    _waiter(
        "def on_timed_out",
        "with the database down it is a timeout like any",
        "elif job.error is not None:",
        "elif False:",
        "elif job.storing or job.is_silent(0.0 if wait.is_look else _SILENCE_SECONDS) or self._lanes.are_cut_off:",
        "elif job.storing:",
        test="test_gateway_faults.py::test_with_the_database_down_a_wait_raises_at_its_timeout_and_at_the_deadline",
    ),
    _waiter("def on_polled", "an unknown job is waited for", "if result is None:", "if False:"),
    # --- what both share
    _cursor(
        "def position",
        "no claim from zero is owed",
        "self._again or self.owed or",
        "self._again or",
        test="test_cursor_edges.py::test_what_is_owed_under_a_backlog_is_the_very_next_claim",
    ),
    _cursor(
        "def position",
        "under a backlog never from zero",
        " or now >= self._zero_at + _EVERY_SECONDS",
        "",
        test=_ZERO,
    ),
    _cursor("def answered", "it trails by nothing", "max(highest_seq - _TRAIL, 0)", "highest_seq", test=_ZERO),
    _batcher(
        "async def _send(",
        "one bad row hurts its whole batch",
        "if self._splits(error):",
        "if False:",
        test="test_batcher.py::test_a_bad_row_hurts_only_itself",
    ),
    _batcher(
        "def _may_repeat",
        "what may have had an effect is sent again",
        "self._idempotent and isinstance(",
        "isinstance(",
        test="test_batcher.py::test_without_idempotence_only_a_batch_that_had_no_effect_is_sent_again",
    ),
]
