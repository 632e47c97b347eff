"""The one error tree of Relay Dispatch.

Every error that a caller can foresee is a `RelayDispatchError`. It carries

* ``code``: a stable string ``S2R-…``, safe to match on and to store,
* ``retryable``: whether the same call may succeed if it is simply made again,
* the ids it is about, as attributes.

Driver errors are turned into these in one place, `dispatch_core.database.mapped_errors`.
This module imports nothing of ours.
"""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID

__all__ = [
    "BacklogFullError",
    "ClientClosedError",
    "ConfigurationError",
    "ConnectionLostError",
    "DatabaseBusyError",
    "DatabaseError",
    "DatabaseUnavailableError",
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
    "LeaseLostError",
    "MalformedHeadersError",
    "MigrationDriftError",
    "MigrationError",
    "MigrationRightsError",
    "RelayDispatchError",
    "SchemaMismatchError",
    "TenancyDeniedError",
    "TenancyError",
    "TenancyMismatchError",
    "TenancyUnboundError",
    "TooLargeError",
    "TransactionRequiredError",
    "UnknownJobError",
    "WaitTimeoutError",
]


class RelayDispatchError(Exception):
    """Something that Relay Dispatch foresees went wrong."""

    code: ClassVar[str] = "S2R-ERROR"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None) -> None:
        # As in procrastinate, the docstring is the default message: one place to read and to write it.
        super().__init__(message or (type(self).__doc__ or type(self).__name__).split("\n", 1)[0])


# --- bad input: answered before any SQL -----------------------------------------------------------


class InvalidInputError(RelayDispatchError, ValueError):
    """An argument is not acceptable; nothing was sent to the database."""

    code = "S2R-INPUT-INVALID"


class InvalidNameError(InvalidInputError):
    """A tenant, relay, operation or key is empty, too long, or holds NUL or a lone surrogate."""

    code = "S2R-NAME-INVALID"


class InvalidHeadersError(InvalidInputError):
    """Headers must be a map of str to str or list of str, without NUL or lone surrogates."""

    code = "S2R-HEADERS-INVALID"


class InvalidBodyError(InvalidInputError):
    """A body must be bytes, str or a JSON value, and within the size limit."""

    code = "S2R-BODY-INVALID"


class InvalidPayloadError(InvalidInputError):
    """A payload must be a JSON value without NUL, and within the size limit."""

    code = "S2R-PAYLOAD-INVALID"


class InvalidDeadlineError(InvalidInputError):
    """A ttl, delay or expires_at is not a usable time."""

    code = "S2R-DEADLINE-INVALID"


class InvalidResultError(InvalidInputError):
    """A handler's result cannot be stored: too large, or not bytes, str or JSON."""

    code = "S2R-RESULT-INVALID"


class TooLargeError(InvalidInputError):
    """The database refused a value for its size: the installation's limit is below this process's setting."""

    code = "S2R-TOO-LARGE"


class ConfigurationError(RelayDispatchError, ValueError):
    """The settings do not make a usable configuration."""

    code = "S2R-CONFIGURATION-INVALID"


class HandlerRegistrationError(RelayDispatchError, ValueError):
    """A handler cannot be registered: its signature is wrong, or its operation is taken."""

    code = "S2R-HANDLER-INVALID"


# --- tenancy --------------------------------------------------------------------------------------


class TenancyError(RelayDispatchError):
    """The call is outside what this connection may do for a tenant."""

    code = "S2R-TENANCY"


class TenancyUnboundError(TenancyError):
    """No tenant was given, and none is bound on the connection."""

    code = "S2R-TENANCY-UNBOUND"


class TenancyMismatchError(TenancyError):
    """The tenant given is not the one that is bound on the connection."""

    code = "S2R-TENANCY-MISMATCH"


class TenancyDeniedError(TenancyError):
    """This login has no binding for that tenant or relay."""

    code = "S2R-TENANCY-DENIED"


# --- dispatch -------------------------------------------------------------------------------------


class IdempotencyConflictError(RelayDispatchError):
    """The idempotency key is in use for a request that differs from this one."""

    code = "S2R-IDEMPOTENCY-CONFLICT"

    def __init__(self, message: str | None = None, *, tenant_id: str | None = None, key: str | None = None) -> None:
        super().__init__(message)
        self.tenant_id = tenant_id
        self.key = key


class BacklogFullError(RelayDispatchError):
    """So many jobs wait for this relay that one more would pass max_pending; nothing was stored.

    `pending` is how many wait, as far as was counted: counting ends at the bound; `jobs` how many were to be stored.
    `retry_after_seconds` is how long the relay needs for a tenth of the bound, as fast as it has been lately: from 0.1
    to 60.
    """

    code = "S2R-BACKLOG-FULL"
    retryable = True

    def __init__(
        self,
        message: str | None = None,
        *,
        tenant_id: str | None = None,
        relay_id: str | None = None,
        pending: int = 0,
        max_pending: int = 0,
        jobs: int = 1,
        retry_after_seconds: float = 1.0,
    ) -> None:
        super().__init__(
            message
            or f"{pending} jobs wait for relay {relay_id}, and with {jobs} more there would be more than {max_pending}"
            f" (max_pending): nothing was stored; room is likely in {retry_after_seconds:.3g} s"
        )
        self.tenant_id = tenant_id
        self.relay_id = relay_id
        self.pending = pending
        self.max_pending = max_pending
        self.jobs = jobs
        self.retry_after_seconds = retry_after_seconds


class UnknownJobError(RelayDispatchError):
    """No such job for this tenant: never enqueued, rolled back, purged, or another tenant's."""

    code = "S2R-JOB-UNKNOWN"

    def __init__(self, message: str | None = None, *, job_id: UUID | None = None) -> None:
        super().__init__(message or (f"no job {job_id} for this tenant" if job_id else None))
        self.job_id = job_id


class WaitTimeoutError(RelayDispatchError, TimeoutError):
    """The job had no result when the wait's timeout ended; the job itself goes on."""

    code = "S2R-WAIT-TIMEOUT"
    retryable = True

    def __init__(self, message: str | None = None, *, job_id: UUID | None = None) -> None:
        super().__init__(message or (f"no result of job {job_id} within the timeout" if job_id else None))
        self.job_id = job_id


class ClientClosedError(RelayDispatchError):
    """The client is not open, or was closed during the call; a job that was enqueued goes on."""

    code = "S2R-CLIENT-CLOSED"

    def __init__(self, message: str | None = None, *, job_id: UUID | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class MalformedHeadersError(RelayDispatchError):
    """The headers stored for a job are not a map of str to str or list of str."""

    code = "S2R-HEADERS-INVALID"

    def __init__(self, message: str | None = None, *, job_id: UUID | None = None) -> None:
        super().__init__(message or (f"the stored headers of job {job_id} are malformed" if job_id else None))
        self.job_id = job_id


# --- outbox ---------------------------------------------------------------------------------------


class TransactionRequiredError(RelayDispatchError):
    """This is written in the caller's open transaction, and the connection is in none; nothing was sent."""

    code = "S2R-TRANSACTION-REQUIRED"


# --- durable jobs ---------------------------------------------------------------------------------


class LeaseLostError(RelayDispatchError):
    """The lease of this chunk is lost: it ran out, somebody else has the chunk, or its job was cancelled."""

    code = "S2R-LEASE-LOST"

    def __init__(self, message: str | None = None, *, job_id: UUID | None = None, seq: int | None = None) -> None:
        super().__init__(message or (f"the lease of chunk {seq} of job {job_id} is lost" if job_id else None))
        self.job_id = job_id
        self.seq = seq


class JobClosedError(RelayDispatchError):
    """The job takes no chunks any more, or has not as many as were counted."""

    code = "S2R-JOB-CLOSED"

    def __init__(self, message: str | None = None, *, job_id: UUID | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


# --- database -------------------------------------------------------------------------------------


class DatabaseError(RelayDispatchError):
    """PostgreSQL refused a statement for a reason that is not one of ours."""

    code = "S2R-DATABASE-ERROR"

    def __init__(self, message: str | None = None, *, sqlstate: str | None = None, job_id: UUID | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.job_id = job_id


class DatabaseUnavailableError(DatabaseError):
    """PostgreSQL cannot be reached, or has ended the session.

    What was asked for has had no effect, unless the message says that this is unknown: of a call that several
    statements were tried for, until its time was over.

    Its subclass `ConnectionLostError` is for one statement that was under way.
    """

    code = "S2R-DATABASE-UNAVAILABLE"
    retryable = True


class ConnectionLostError(DatabaseUnavailableError):
    """The connection broke while a statement was under way; whether it took effect is unknown."""

    code = "S2R-CONNECTION-LOST"


class DatabaseBusyError(DatabaseError):
    """A serialization failure, deadlock or lock timeout; the transaction had no effect."""

    code = "S2R-DATABASE-BUSY"
    retryable = True


# --- schema ---------------------------------------------------------------------------------------


class SchemaMismatchError(RelayDispatchError):
    """The schema in the database is missing, older or newer than what this version needs."""

    code = "S2R-SCHEMA-MISMATCH"


class MigrationError(RelayDispatchError):
    """A migration step failed; it left nothing behind."""

    code = "S2R-MIGRATION-FAILED"


class MigrationDriftError(MigrationError):
    """A migration that was applied has since been changed."""

    code = "S2R-MIGRATION-DRIFT"


class MigrationRightsError(MigrationError):
    """The migrating login lacks rights; `statements` is what a DBA must run first."""

    code = "S2R-MIGRATION-RIGHTS"

    def __init__(self, message: str | None = None, *, statements: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.statements = statements
