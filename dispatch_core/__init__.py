"""What gateways and relays share: the protocol's Python side.

    migrate                   bring a database's schema `relay` up to this version
    RelayDispatchRepository   the dispatch verbs on a connection of yours, one SQL function each
    Outbox                    events written in a transaction of yours, and drained into sinks afterwards
    DispatchRequest, DispatchJob, DispatchResult, DispatchStatus    what crosses the seams
    RelayDispatchError        the root of every error, with a stable `code` and `retryable`

Applications use `gateway_sdk` and `relay_sdk`, which stand on this package and never on each other.
"""

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import (
    ClientClosedError,
    ConfigurationError,
    ConnectionLostError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    HandlerRegistrationError,
    IdempotencyConflictError,
    InvalidBodyError,
    InvalidDeadlineError,
    InvalidHeadersError,
    InvalidInputError,
    InvalidNameError,
    InvalidPayloadError,
    InvalidResultError,
    MalformedHeadersError,
    MigrationDriftError,
    MigrationError,
    MigrationRightsError,
    RelayDispatchError,
    SchemaMismatchError,
    TenancyDeniedError,
    TenancyError,
    TenancyMismatchError,
    TenancyUnboundError,
    TransactionRequiredError,
    UnknownJobError,
    WaitTimeoutError,
)
from dispatch_core.migrate import migrate
from dispatch_core.models import (
    ClaimedJobs,
    Completion,
    DispatchJob,
    DispatchRequest,
    DispatchResult,
    DispatchStatus,
    EndedJob,
    MalformedJob,
    PutBack,
    Settled,
    WriteOutcome,
)
from dispatch_core.outbox import (
    DrainReport,
    Outbox,
    OutboxEvent,
    OutboxMessage,
    OutboxPark,
    OutboxRetry,
    OutboxSettings,
)
from dispatch_core.tenancy import DISPATCH_TENANT_SCOPE_SQL

__all__ = [  # noqa: RUF022  (grouped: the verbs, the values, the errors)
    "DISPATCH_TENANT_SCOPE_SQL",
    "Outbox",
    "RelayDispatchRepository",
    "migrate",
    #
    "ClaimedJobs",
    "Completion",
    "DispatchJob",
    "DispatchRequest",
    "DispatchResult",
    "DispatchStatus",
    "DrainReport",
    "EndedJob",
    "MalformedJob",
    "OutboxEvent",
    "OutboxMessage",
    "OutboxPark",
    "OutboxRetry",
    "OutboxSettings",
    "PutBack",
    "Settled",
    "WriteOutcome",
    #
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
    "TransactionRequiredError",
    "UnknownJobError",
    "WaitTimeoutError",
]
