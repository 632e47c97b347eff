"""The names that users may rely on: a change of them is a change of this file."""

from __future__ import annotations

import importlib
import inspect
import types

import pytest

SURFACE = {
    "dispatch_core": [
        "BacklogFullError",
        "ChunkOutcome",
        "ChunkSettled",
        "ChunkSpec",
        "ChunkStatus",
        "ClaimedChunk",
        "ClaimedChunks",
        "ClaimedJobs",
        "ClientClosedError",
        "Completion",
        "ConfigurationError",
        "ConnectionLostError",
        "Controlled",
        "DISPATCH_TENANT_SCOPE_SQL",
        "DatabaseBusyError",
        "DatabaseError",
        "DatabaseUnavailableError",
        "DispatchJob",
        "DispatchRequest",
        "DispatchResult",
        "DispatchStatus",
        "DrainReport",
        "DurableChunk",
        "DurableJob",
        "DurableJobStore",
        "DurableJobsSettings",
        "DurableRepository",
        "EndedJob",
        "EventPage",
        "HandlerRegistrationError",
        "IdempotencyConflictError",
        "InvalidBodyError",
        "InvalidDeadlineError",
        "InvalidHeadersError",
        "InvalidInputError",
        "InvalidNameError",
        "InvalidPayloadError",
        "InvalidResultError",
        "JobClosedError",
        "JobEvent",
        "JobEventType",
        "JobLease",
        "JobProgress",
        "JobStatus",
        "LeaseLostError",
        "MalformedHeadersError",
        "MalformedJob",
        "MigrationDriftError",
        "MigrationError",
        "MigrationRightsError",
        "Outbox",
        "OutboxEvent",
        "OutboxMessage",
        "OutboxPark",
        "OutboxRetry",
        "OutboxSettings",
        "PutBack",
        "QueryPage",
        "ReapedChunk",
        "RelayDispatchError",
        "RelayDispatchRepository",
        "Resolved",
        "RowError",
        "SchemaMismatchError",
        "Settled",
        "TenancyDeniedError",
        "TenancyError",
        "TenancyMismatchError",
        "TenancyUnboundError",
        "TooLargeError",
        "TransactionRequiredError",
        "UnknownJobError",
        "WaitTimeoutError",
        "WriteOutcome",
        "migrate",
    ],
    "gateway_sdk": [
        "ChunkSpec",
        "ChunkStatus",
        "DispatchRequest",
        "DispatchResult",
        "DispatchSink",
        "DispatchStatus",
        "DurableJob",
        "DurableJobs",
        "DurableJobsSettings",
        "GatewayClient",
        "GatewayHealth",
        "GatewaySettings",
        "JobProgress",
        "JobStatus",
        "OutboxDrainer",
        "OutboxRoute",
        "TenantClient",
        "WebhookSink",
    ],
    "relay_sdk": [
        "ChunkContext",
        "ChunkOutcome",
        "ChunkStopped",
        "DispatchJob",
        "Health",
        "JobLease",
        "Reject",
        "Relay",
        "RelayMetrics",
        "RelaySettings",
        "Reply",
        "Retry",
        "Snooze",
        "StopReason",
        "run_relays",
    ],
}

# The verbs of the repository, as the documents name them, with their parameters.
REPOSITORY = {
    "enqueue": "relay_id operation headers body json ttl expires_at delay max_attempts idempotency_key max_pending"
    " notify",
    "enqueue_many": "requests max_pending notify",
    "claim": "relay_id claimed_by limit claim_id lease_seconds tenants after start body_limit_bytes sweep_seconds"
    " timeout",
    "heartbeat": "relay_id claims claimed_by lease_seconds",
    "complete": "job_id relay_id fence claimed_by status response_status response_headers response_body error_code"
    " error_message",
    "complete_many": "relay_id completions claimed_by notify timeout",
    "retry": "relay_id items claimed_by",
    "release": "relay_id claims claimed_by",
    "poll_status": "job_id",
    "poll_many": "job_ids",
    "mark_expired": "job_id",
    "reclaim": "relay_id lease_seconds limit tenants",
    "now": "",
}

# The methods of the store of durable jobs, by the names of the issue, with their parameters.
STORE = {
    "now": "",
    "insert_job": "kind params job_id idempotent max_attempts priority created_by conn",
    "insert_chunks": "job_id chunks from_seq conn",
    "get_job": "job_id fresh",
    "get_chunk": "job_id seq",
    "get_chunks": "job_id status",
    "query": "table filter job_id after limit",
    "events": "job_id after limit",
    "row_errors": "job_id after seq limit",
    "set_job_status": "job_id from_ to extra",
    "set_job_status_with_event": "job_id from_ to event extra actor channel holder detail",
    "update_job": "job_id extra",
    "set_chunk_statuses": "job_id from_ to extra seqs",
    "refresh_counters": "job_id",
    "finish": "job_id",
    "claim_chunk": "chunk lease_ttl_seconds holder conn",
    "claim_next_chunk_skip_locked": "job_id lease_ttl_seconds holder",
    "claim_next_chunk": "job_id lease_ttl_seconds holder",
    "claim_chunks": "kinds limit lease_ttl_seconds holder",
    "heartbeat": "lease lease_ttl_seconds conn",
    "checkpoint": "lease value rows_done rows_failed lease_ttl_seconds conn",
    "complete_chunk": "lease outcome conn",
    "fail_chunk": "lease message retryable delay_seconds",
    "release_chunk": "lease to",
    "record_row_errors": "lease errors conn",
    "reap_expired": "reaper",
    "record_event": "job_id chunk event actor channel holder detail",
}

FIELDS = {
    "DispatchJob": "job_id tenant_id relay_id operation request_headers body attempt fence created_at expires_at",
    "DispatchResult": "job_id status response_status response_headers response_body error_code error_message attempt"
    " created_at claimed_at completed_at expires_at",
}


@pytest.mark.parametrize("package", SURFACE)
def test_the_public_names_of_a_package_are_these(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == SURFACE[package]
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("package", SURFACE)
def test_nothing_public_is_left_out_of_the_list(package: str) -> None:
    """What an `__init__` imports without naming it is an accident that somebody would come to rely on."""
    module = importlib.import_module(package)
    accidental = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in module.__all__ and not isinstance(value, types.ModuleType)
    }
    assert accidental - {"annotations"} == set()


def test_the_repository_has_its_verbs_with_their_parameters() -> None:
    from dispatch_core import RelayDispatchRepository

    assert list(inspect.signature(RelayDispatchRepository).parameters) == ["conn", "tenant"]
    for verb, parameters in REPOSITORY.items():
        method = getattr(RelayDispatchRepository, verb)
        assert list(inspect.signature(method).parameters)[1:] == parameters.split(), verb
        assert inspect.iscoroutinefunction(method)


def test_the_store_of_durable_jobs_has_its_methods_with_their_parameters() -> None:
    from dispatch_core import DurableJobStore

    parameters = list(inspect.signature(DurableJobStore).parameters)
    assert parameters == ["database", "tenant", "settings", "holder", "logger"]
    assert isinstance(DurableJobStore.settings, property)
    assert not inspect.iscoroutinefunction(DurableJobStore.uses_skip_locked_claims)
    for verb, names in STORE.items():
        method = getattr(DurableJobStore, verb)
        assert list(inspect.signature(method).parameters)[1:] == names.split(), verb
        assert inspect.iscoroutinefunction(method)
    public = {name for name in dir(DurableJobStore) if not name.startswith("_")}
    assert public == {*STORE, "settings", "holder", "uses_skip_locked_claims"}


def test_the_statuses_of_jobs_and_chunks_are_exactly_these() -> None:
    from dispatch_core import ChunkStatus, JobStatus

    jobs = "queued running paused needs_review completed completed_with_errors failed cancelled"
    assert [status.value for status in JobStatus] == jobs.split()
    assert [status.value for status in JobStatus if status.is_terminal] == jobs.split()[4:]
    assert [
        status.value for status in ChunkStatus
    ] == "pending running retry done failed needs_review cancelled".split()
    assert [status.value for status in ChunkStatus if status.is_terminal] == ["done", "failed", "cancelled"]


@pytest.mark.parametrize("name", FIELDS)
def test_jobs_and_results_have_the_fields_that_were_promised(name: str) -> None:
    import dataclasses

    import dispatch_core

    fields = {field.name for field in dataclasses.fields(getattr(dispatch_core, name))}
    assert fields >= set(FIELDS[name].split())


def test_the_five_states_are_exactly_these() -> None:
    from dispatch_core import DispatchStatus

    assert [status.value for status in DispatchStatus] == ["pending", "claimed", "succeeded", "failed", "expired"]
    assert [status.is_terminal for status in DispatchStatus] == [False, False, True, True, True]


def test_every_error_has_a_stable_code_of_its_own() -> None:
    import dispatch_core
    from dispatch_core import RelayDispatchError

    errors = [
        value
        for value in vars(dispatch_core).values()
        if isinstance(value, type) and issubclass(value, RelayDispatchError)
    ]
    codes: dict[str, str] = {}
    for error in errors:
        assert error.code.startswith("S2R-")
        # One code has two classes: headers are invalid when they are given, and malformed when they were stored so.
        if error.code != "S2R-HEADERS-INVALID":
            assert codes.setdefault(error.code, error.__name__) == error.__name__
    assert {"S2R-TENANCY-UNBOUND", "S2R-TENANCY-MISMATCH", "S2R-TENANCY-DENIED"} <= set(codes)
