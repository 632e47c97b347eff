"""The store of durable jobs: what is wrong with arguments is found before any SQL, and names the field."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatch_core import (
    ChunkOutcome,
    ChunkSpec,
    ChunkStatus,
    ConfigurationError,
    DurableJobsSettings,
    DurableJobStore,
    DurableRepository,
    InvalidDeadlineError,
    InvalidInputError,
    InvalidNameError,
    InvalidPayloadError,
    JobLease,
    JobProgress,
    JobStatus,
    RowError,
    TenancyUnboundError,
)
from dispatch_core.database import Database

JOB = uuid4()
LEASE = JobLease("acme", JOB, 1, uuid4(), 1, "me", datetime.now(UTC), time.monotonic())
NAN = float("nan")
MOVE = ("done", "retry")
BAD = RowError(1, "x")
ONE: Any = "1"


class Text(StrEnum):
    """Words of somebody else's."""

    OK = "queued"


@pytest.fixture
def store() -> DurableJobStore:
    """A store that can send nothing: an argument that is let through is a DatabaseUnavailableError."""
    settings = DurableJobsSettings(max_payload_bytes=1000, max_checkpoint_bytes=100)
    return DurableJobStore(Database("postgresql://nobody@localhost:1/nowhere"), "acme", settings=settings)


Call = Callable[[Any], Any]

WRONG: list[tuple[str, type[InvalidInputError], Call]] = [
    ("kind must not be empty", InvalidNameError, lambda s: s.insert_job("")),
    ("kind must be a str", InvalidNameError, lambda s: s.insert_job(5)),
    ("kind has 201 bytes", InvalidNameError, lambda s: s.insert_job("x" * 201)),
    ("kind holds a NUL", InvalidNameError, lambda s: s.insert_job("a\0")),
    ("kind holds a lone surrogate", InvalidNameError, lambda s: s.insert_job("\ud800")),
    ("params has 1002 bytes; at most 1000", InvalidPayloadError, lambda s: s.insert_job("x", "x" * 1000)),
    ("params holds a NUL", InvalidPayloadError, lambda s: s.insert_job("x", {"a": "\0"})),
    ("params", InvalidPayloadError, lambda s: s.insert_job("x", NAN)),
    ("params", InvalidPayloadError, lambda s: s.insert_job("x", object())),
    ("params", InvalidPayloadError, lambda s: s.insert_job("x", {1, 2})),
    ("job_id must be a UUID", InvalidInputError, lambda s: s.insert_job("x", job_id=str(JOB))),
    ("idempotent must be true or false", InvalidInputError, lambda s: s.insert_job("x", idempotent=1)),
    ("max_attempts must be from 1", InvalidInputError, lambda s: s.insert_job("x", max_attempts=0)),
    ("max_attempts must be an int", InvalidInputError, lambda s: s.insert_job("x", max_attempts=2.0)),
    ("priority must be an int", InvalidInputError, lambda s: s.insert_job("x", priority=True)),
    ("priority must be from", InvalidInputError, lambda s: s.insert_job("x", priority=-(2**63))),
    ("priority must be from", InvalidInputError, lambda s: s.insert_job("x", priority=10**5000)),
    ("created_by has 2001 bytes", InvalidNameError, lambda s: s.insert_job("x", created_by="x" * 2001)),
    ("job_id must be a UUID", InvalidInputError, lambda s: s.insert_chunks(None, [1])),
    ("chunks must be a list", InvalidInputError, lambda s: s.insert_chunks(JOB, "abc")),
    ("chunks must be a list", InvalidInputError, lambda s: s.insert_chunks(JOB, {"a": 1})),
    ("chunks must be a list", InvalidInputError, lambda s: s.insert_chunks(JOB, 5)),
    (r"the payload of chunks\[1\] has", InvalidPayloadError, lambda s: s.insert_chunks(JOB, [1, "x" * 999])),
    (r"the payload of chunks\[0\]", InvalidPayloadError, lambda s: s.insert_chunks(JOB, [ChunkSpec(NAN)])),
    (r"rows of chunks\[1\] must be from 0", InvalidInputError, lambda s: s.insert_chunks(JOB, [1, ChunkSpec(3, -1)])),
    ("from_seq must be from 1", InvalidInputError, lambda s: s.insert_chunks(JOB, [1], from_seq=0)),
    ("from_seq must be from 1", InvalidInputError, lambda s: s.insert_chunks(JOB, range(9), from_seq=2**63 - 7)),
    ("job_id must be a UUID", InvalidInputError, lambda s: s.get_job("x")),
    ("fresh must be true or false", InvalidInputError, lambda s: s.get_job(JOB, fresh=None)),
    ("seq must be an int", InvalidInputError, lambda s: s.get_chunk(JOB, "1")),
    ("status must be one of pending, running", InvalidInputError, lambda s: s.get_chunks(JOB, status="queued")),
    ("limit must be from 1", InvalidInputError, lambda s: s.events(JOB, limit=0)),
    ("after must be a str", InvalidNameError, lambda s: s.events(JOB, 5)),
    ("after must be a RowError", InvalidInputError, lambda s: s.row_errors(JOB, after=(1, 2))),
    ("seq of after must be an int", InvalidInputError, lambda s: s.row_errors(JOB, after=RowError(1, "x"))),
    ("an item of from_ must be one of", InvalidInputError, lambda s: s.set_job_status(JOB, ["submitting"], "paused")),
    ("from_ must not be empty", InvalidInputError, lambda s: s.set_job_status(JOB, [], "paused")),
    ("from_ must be one or several", InvalidInputError, lambda s: s.set_job_status(JOB, None, "paused")),
    ("to must be one of queued, running", InvalidInputError, lambda s: s.set_job_status(JOB, "queued", "removing")),
    ("to must be one of", InvalidInputError, lambda s: s.set_job_status(JOB, "queued", "paused' or true")),
    ("extra must be a map", InvalidInputError, lambda s: s.set_job_status(JOB, "queued", "paused", [1])),
    (r"extra\['max_attempts'\] must be from 1", InvalidInputError, lambda s: s.update_job(JOB, {"max_attempts": 0})),
    (r"extra\['priority'\] must be an int", InvalidInputError, lambda s: s.update_job(JOB, {"priority": None})),
    (r"extra\['last_error'\] must be a str", InvalidNameError, lambda s: s.update_job(JOB, {"last_error": 5})),
    (r"extra\['params'\] has", InvalidPayloadError, lambda s: s.update_job(JOB, {"params": "x" * 999})),
    ("type of event", InvalidNameError, lambda s: s.set_job_status_with_event(JOB, "queued", "paused", "")),
    (
        "detail of event",
        InvalidPayloadError,
        lambda s: s.set_job_status_with_event(JOB, "queued", "paused", "paused", detail=NAN),
    ),
    ("actor of event", InvalidNameError, lambda s: s.set_job_status_with_event(JOB, "queued", "paused", "p", actor=5)),
    ("to must be one of pending, retry", InvalidInputError, lambda s: s.set_chunk_statuses(JOB, "retry", "running")),
    (r"extra\['outcome'\] cannot", InvalidInputError, lambda s: s.set_chunk_statuses(JOB, *MOVE, {"outcome": 1})),
    (r"extra\['attempts'\] can only", InvalidInputError, lambda s: s.set_chunk_statuses(JOB, *MOVE, {"attempts": 5})),
    ("an item of seqs", InvalidInputError, lambda s: s.set_chunk_statuses(JOB, "done", "retry", seqs=["1"])),
    ("chunk must be a DurableChunk", InvalidInputError, lambda s: s.claim_chunk(LEASE)),
    ("lease_ttl_seconds must be above 0", InvalidDeadlineError, lambda s: s.claim_chunks(["x"], lease_ttl_seconds=0)),
    ("lease_ttl_seconds must be above 0", InvalidDeadlineError, lambda s: s.claim_chunks(["x"], lease_ttl_seconds=NAN)),
    ("lease_ttl_seconds must be seconds", InvalidDeadlineError, lambda s: s.claim_chunks(["x"], lease_ttl_seconds="5")),
    ("kinds must be a list", InvalidInputError, lambda s: s.claim_chunks("import")),
    ("kinds must not be empty", InvalidInputError, lambda s: s.claim_chunks([])),
    ("an item of kinds must not be empty", InvalidNameError, lambda s: s.claim_chunks(["x", ""])),
    ("limit must be from 1", InvalidInputError, lambda s: s.claim_chunks(["x"], limit=0)),
    ("holder has", InvalidNameError, lambda s: s.claim_next_chunk(JOB, holder="x" * 201)),
    ("holder must not be empty", InvalidNameError, lambda s: s.claim_next_chunk_skip_locked(JOB, holder="")),
    ("lease must be a JobLease", InvalidInputError, lambda s: s.heartbeat(None)),
    ("lease must be a JobLease", InvalidInputError, lambda s: s.complete_chunk((JOB, 1))),
    ("lease_ttl_seconds must be above 0", InvalidDeadlineError, lambda s: s.heartbeat(LEASE, -1)),
    ("lease_ttl_seconds must be above 0", InvalidDeadlineError, lambda s: s.heartbeat(LEASE, 10**400)),
    ("checkpoint has 102 bytes; at most 100", InvalidPayloadError, lambda s: s.checkpoint(LEASE, "x" * 100)),
    ("checkpoint", InvalidPayloadError, lambda s: s.checkpoint(LEASE, object())),
    ("rows_done must be from 0", InvalidInputError, lambda s: s.checkpoint(LEASE, 1, rows_done=-1)),
    ("lease_ttl_seconds must be above 0", InvalidDeadlineError, lambda s: s.checkpoint(LEASE, 1, lease_ttl_seconds=0)),
    ("job_id must be a UUID", InvalidInputError, lambda s: s.finish(5)),
    ("rows_failed must be an int", InvalidInputError, lambda s: s.checkpoint(LEASE, 1, rows_failed="1")),
    ("outcome must be a ChunkOutcome", InvalidInputError, lambda s: s.complete_chunk(LEASE, {"a": 1})),
    ("outcome has", InvalidPayloadError, lambda s: s.complete_chunk(LEASE, ChunkOutcome("x" * 100))),
    ("rows_done must be from 0", InvalidInputError, lambda s: s.complete_chunk(LEASE, ChunkOutcome(rows_done=2**63))),
    ("retryable must be true or false", InvalidInputError, lambda s: s.fail_chunk(LEASE, "x", None)),
    ("delay_seconds must be from 0", InvalidDeadlineError, lambda s: s.fail_chunk(LEASE, "x", delay_seconds=-0.1)),
    ("to must be one of pending, retry,", InvalidInputError, lambda s: s.release_chunk(LEASE, "done")),
    ("errors must be a list", InvalidInputError, lambda s: s.record_row_errors(LEASE, "x")),
    (r"errors\[1\] must be a RowError", InvalidInputError, lambda s: s.record_row_errors(LEASE, [BAD, (2, "y")])),
    (
        r"row of errors\[0\] must be an int",
        InvalidInputError,
        lambda s: s.record_row_errors(LEASE, [RowError(ONE, "x")]),
    ),
    (r"code of errors\[0\] has 201", InvalidNameError, lambda s: s.record_row_errors(LEASE, [RowError(1, "x" * 201)])),
    (r"data of errors\[0\]", InvalidPayloadError, lambda s: s.record_row_errors(LEASE, [RowError(1, "x", "", NAN)])),
    ("reaper must not be empty", InvalidNameError, lambda s: s.reap_expired("")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "error", "call"), WRONG, ids=range(len(WRONG)))
async def test_a_wrong_argument_is_refused_before_any_sql_and_named(
    store: DurableJobStore, words: str, error: type[InvalidInputError], call: Call
) -> None:
    with pytest.raises(InvalidInputError, match=f"^{words}") as refused:
        await call(store)
    assert type(refused.value) is error


NEVER_WRITTEN = (
    "status", "job_id", "tenant_id", "kind", "idempotent", "created_by", "created_at", "started_at", "ended_at", "rank",
    "updated_at", "lease_token", "lease_version", "lease_expires_at", "claimed_by", "rows_done", "chunks_done",
    "job_seq", "priority = 1 --", "", "PRIORITY",
)  # fmt: skip


@pytest.mark.parametrize("column", [*NEVER_WRITTEN, 5, None])
async def test_status_lease_identity_and_counters_are_never_written_from_outside(
    store: DurableJobStore, column: Any
) -> None:
    calls: list[Call] = [
        lambda extra: store.update_job(JOB, extra),
        lambda extra: store.set_job_status(JOB, "queued", "paused", {"priority": 1, **extra}),
        lambda extra: store.set_job_status_with_event(JOB, "queued", "paused", "paused", extra),
        lambda extra: store.set_chunk_statuses(JOB, *MOVE, extra),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match=r"^extra\[.*\] cannot be written; "):
            await call({column: "x"})


def test_a_store_needs_a_tenant_that_can_be_one_and_a_connection() -> None:
    database = Database("postgresql://nobody@localhost:1/nowhere")
    with pytest.raises(InvalidNameError, match=r"^tenant"):
        DurableJobStore(database, "")
    with pytest.raises(InvalidNameError, match=r"^holder"):
        DurableJobStore(database, "acme", holder="\0")
    with pytest.raises(InvalidInputError, match=r"^conn must be a connection of asyncpg, not str"):
        DurableJobStore("postgresql://", "acme")  # type: ignore[arg-type]
    assert DurableJobStore(database).holder != DurableJobStore(database).holder


async def test_the_repository_checks_what_the_store_does_not_have() -> None:
    verbs = DurableRepository(Database("postgresql://nobody@localhost:1/nowhere"))
    with pytest.raises(TenancyUnboundError):
        await verbs.jobs("", [JOB])
    with pytest.raises(InvalidInputError, match=r"^action must be one of pause"):
        await verbs.control("acme", JOB, "delete")
    with pytest.raises(InvalidInputError, match=r"^decision must be one of retry"):
        await verbs.resolve("acme", JOB, 1, "maybe", actor="ann")
    with pytest.raises(InvalidInputError, match="one for each"):
        await verbs.complete_many([LEASE], [])
    with pytest.raises(InvalidInputError, match=r"^token must be a UUID"):
        await verbs.claim(["acme"], ["x"], limit=1, holder="me", token=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"^event has no field"):
        await verbs.set_job_status("acme", JOB, "queued", "paused", event={"type": "x", "at": "now"})
    assert await verbs.heartbeat([]) == []
    assert await verbs.complete_many([], []) == []
    assert await verbs.release([]) == []


def test_statuses_are_taken_by_value_and_by_member() -> None:
    assert JobStatus(Text.OK) is JobStatus.QUEUED
    assert ChunkStatus("retry") is ChunkStatus.RETRY


def test_progress_goes_by_rows_then_by_chunks() -> None:
    chunks = dict.fromkeys(ChunkStatus, 0)
    base = JobProgress(JobStatus.RUNNING, chunks, 0, 0, 0, 0, None, None, None)
    assert base.fraction is None
    assert dataclasses.replace(base, rows_total=8, rows_done=1, rows_failed=1).fraction == 0.25
    assert dataclasses.replace(base, rows_total=8, rows_done=9).fraction == 1.0
    half = {**chunks, ChunkStatus.DONE: 1, ChunkStatus.FAILED: 1, ChunkStatus.RUNNING: 2}
    assert dataclasses.replace(base, chunks=half, chunks_total=4).fraction == 0.5
    cancelled = {**chunks, ChunkStatus.DONE: 1, ChunkStatus.CANCELLED: 3}
    assert dataclasses.replace(base, status=JobStatus.CANCELLED, chunks=cancelled, chunks_total=4).fraction == 0.25
    assert dataclasses.replace(base, status=JobStatus.COMPLETED).fraction == 1.0


def test_settings_that_do_not_go_together_are_refused() -> None:
    assert DurableJobsSettings(lease_seconds=30).heartbeat_interval_seconds == 10
    assert DurableJobsSettings(lease_seconds=30, heartbeat_seconds=15).heartbeat_interval_seconds == 15
    with pytest.raises(ConfigurationError, match="heartbeat_seconds must be at most half"):
        DurableJobsSettings(lease_seconds=30, heartbeat_seconds=15.1)
    with pytest.raises(ConfigurationError, match="DURABLE_LEASE_SECONDS"):
        DurableJobsSettings(lease_seconds=0)


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_LEASE_SECONDS", "42")
    monkeypatch.setenv("DURABLE_SKIP_LOCKED_CLAIMS", "false")
    settings = DurableJobsSettings()
    assert (settings.lease_seconds, settings.skip_locked_claims) == (42, False)


def test_a_lease_is_a_value_that_never_changes() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LEASE.version = 2  # type: ignore[misc]
    assert isinstance(LEASE.token, UUID)
    assert dataclasses.replace(LEASE) == LEASE
    assert timedelta(0) <= datetime.now(UTC) - LEASE.expires_at
