"""Turn what the driver raises into our errors: whoever calls a statement sees no class of asyncpg's.

Which of ours it is says what the caller may do. `DatabaseUnavailableError`: nothing has happened, so that a second try
is safe. `ConnectionLostError`: a statement was under way, and whether it took effect is unknown. `DatabaseBusyError`:
it took none, and may go well next time.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Literal
from uuid import UUID

import asyncpg
from asyncpg.protocol import Protocol as DriverProtocol

from dispatch_core.errors import (
    ConfigurationError,
    ConnectionLostError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    IdempotencyConflictError,
    InvalidDeadlineError,
    InvalidInputError,
    JobClosedError,
    LeaseLostError,
    RelayDispatchError,
    SchemaMismatchError,
    TenancyDeniedError,
    TenancyMismatchError,
    TenancyUnboundError,
    TooLargeError,
    UnknownJobError,
)

__all__ = ["DRIVER_ERRORS", "READ_ONLY", "mapped_errors", "translate"]

READ_ONLY: Final = "25006"
"""read_only_sql_transaction: the server is a standby, or was demoted to one"""

_OURS: Final[dict[str, type[RelayDispatchError]]] = {
    "S2001": TenancyUnboundError,
    "S2002": TenancyMismatchError,
    "S2003": TenancyDeniedError,
    "S2010": IdempotencyConflictError,
    "S2020": InvalidInputError,
    "S2021": InvalidDeadlineError,
    "S2022": TooLargeError,
    "S2030": UnknownJobError,
    "S2040": SchemaMismatchError,
    "S2041": LeaseLostError,
    "S2042": JobClosedError,
}

_MISSING_OBJECT: Final = frozenset({"42883", "3F000", "42P01"})
"""undefined_function, invalid_schema_name, undefined_table"""

_BUSY: Final = frozenset({"55P03", "57014"})
"""lock_not_available, query_canceled (by statement_timeout or by hand); with class 40 but for 40003"""

_SESSION_OVER: Final = frozenset({READ_ONLY, "25P03", "25P04", "40003", "57P01", "57P02", "57P03", "57P04", "57P05"})
"""read only (a demoted primary), idle or transaction timeout, statement_completion_unknown, shutdown, crash, starting
up, database dropped, idle session timeout; with class 08 and 53"""

_NEVER_STARTED: Final = frozenset({"08001", "08004", "53300", "57P03"})
"""could not connect, connection rejected, too many connections, cannot connect now: no statement was under way"""

_BY_STATEMENT: Final = "statement pooling mode"
"""What PgBouncer says of a transaction where it pools by statement, with the SQLSTATE of any lost connection."""

_STALE_STATEMENT: Final = frozenset({"26000", "42P05"})
"""A prepared statement is unknown, or there already: another backend answers, as behind a transaction pooler."""

DRIVER_ERRORS: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    # What the driver says of a session that has been ended, until its socket is seen to close (seen in asyncpg 0.32):
    # "cannot switch to state 15; another operation (2) is in progress". It is neither of the two above.
    asyncpg.InternalClientError,
    OSError,  # a timeout too
    EOFError,
)
"""All that a statement may raise when the database, or the way to it, is at fault; the only list of them."""


class mapped_errors:  # noqa: N801  (reads as a function: `with mapped_errors():`)
    """Raise ours for what the driver raises inside; let everything else pass, cancellation above all.

    `job_id` goes into the error. `connecting` says that no statement was under way, so that a broken connection has had
    no effect. A class and not a generator: this stands around every statement.
    """

    __slots__ = ("_connecting", "_job_id")

    def __init__(self, *, job_id: UUID | None = None, connecting: bool = False) -> None:
        self._job_id = job_id
        self._connecting = connecting

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        if error is None:
            return False
        translated = translate(error, job_id=self._job_id, connecting=self._connecting)
        if translated is None:
            return False
        raise translated from error


def translate(
    error: BaseException, *, job_id: UUID | None = None, connecting: bool = False
) -> RelayDispatchError | None:
    """Return our error for one of the driver's or of the network's; None for any other, and for one of ours."""
    if isinstance(error, RelayDispatchError):
        return None
    if isinstance(error, asyncpg.PostgresError):
        return _translate_sqlstate(error, job_id, connecting)
    broken = DatabaseUnavailableError if connecting else ConnectionLostError
    if isinstance(error, TimeoutError):
        # asyncpg has already tried to cancel the statement; whether it was is unknown.
        return broken(
            "PostgreSQL could not be reached in time" if connecting else "PostgreSQL did not answer in time",
            job_id=job_id,
        )
    if isinstance(error, (OSError, EOFError)):
        return broken(
            f"PostgreSQL could not be reached: {error}" if connecting else f"the connection broke: {error}",
            job_id=job_id,
        )
    if isinstance(error, asyncpg.exceptions.ClientConfigurationError):
        return ConfigurationError(str(error))
    if isinstance(error, asyncpg.exceptions.TargetServerAttributeNotMatched):
        return DatabaseUnavailableError(str(error), job_id=job_id)
    if isinstance(error, asyncpg.exceptions.OutdatedSchemaCacheError):
        return DatabaseBusyError("the schema changed under this connection; try again", job_id=job_id)
    if isinstance(error, asyncpg.InterfaceError):
        # The driver has no class of its own for "this connection is closed"; it raises it before it sends anything.
        if "closed" in str(error) or "closing" in str(error) or "released back" in str(error):
            return DatabaseUnavailableError(f"the connection is closed: {error}", job_id=job_id)
        return DatabaseError(str(error), job_id=job_id)
    if isinstance(error, asyncpg.InternalClientError):
        # Raised before anything is sent, but for the one of an answer that it cannot read.
        sent = "unknown error" in str(error) or "cannot process" in str(error)
        kind = ConnectionLostError if sent and not connecting else DatabaseUnavailableError
        return kind(f"the connection is unusable: {error}", job_id=job_id)
    if isinstance(error, AttributeError) and _is_terminated(error):
        return DatabaseUnavailableError("the connection was cut; nothing was sent", job_id=job_id)
    return None


def _is_terminated(error: AttributeError) -> bool:
    """Tell whether the driver has stumbled over what it takes away from a connection that is terminated: it looks for
    that before it waits for something, and not again, or not at all (``is_in_transaction``)."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    module = "" if at is None else at.tb_frame.f_globals.get("__name__", "")
    return error.obj is None and module.startswith("asyncpg.") and hasattr(DriverProtocol, error.name or "")


def _translate_sqlstate(error: asyncpg.PostgresError, job_id: UUID | None, connecting: bool) -> RelayDispatchError:
    state: str = error.sqlstate or ""
    # Only the message: DETAIL quotes values of rows, which may be another tenant's.
    # Those that the driver makes itself have no such fields and their text as their argument.
    message = getattr(error, "message", None)
    if message is None:
        message = str(error.args[0] if error.args else type(error).__name__)
        if isinstance(error, asyncpg.DataError):
            return InvalidInputError(message)  # an argument could not be encoded; nothing was sent
    ours = _OURS.get(state)
    if ours is UnknownJobError:
        return UnknownJobError(message, job_id=job_id)
    if ours is not None:
        return ours(message)
    kind = state[:2]
    if _BY_STATEMENT in message:
        return DatabaseError(f"{message}: PgBouncer's pool_mode must be transaction or session", sqlstate=state)
    if state in _SESSION_OVER or kind in ("08", "53"):
        if connecting or state in _NEVER_STARTED or kind == "53":
            return DatabaseUnavailableError(f"PostgreSQL is not available: {message}", sqlstate=state, job_id=job_id)
        return ConnectionLostError(f"PostgreSQL ended the session: {message}", sqlstate=state, job_id=job_id)
    if state in _BUSY or kind == "40":
        return DatabaseBusyError(message, sqlstate=state, job_id=job_id)
    if state == "0A000" and isinstance(error, asyncpg.exceptions.InvalidCachedStatementError):
        return DatabaseBusyError("the schema changed under this connection; try again", sqlstate=state, job_id=job_id)
    if state in _MISSING_OBJECT and ("relay." in message or '"relay"' in message):
        room = next((room for room in ("outbox", "durable") if f"relay.{room}_" in message), None)
        only = f" --only {room}" if room else ""
        mend = f"run `relay-dispatch db migrate{only}`"
        return SchemaMismatchError(f"the schema `relay` is missing or not the one of this version ({message}): {mend}")
    if state == "42501":
        return TenancyDeniedError(f"{message}: this login needs a grant, see `relay-dispatch db grant`")
    if state in _STALE_STATEMENT:
        message += " (behind a transaction pooler set RELAY_DISPATCH_STATEMENT_CACHE_SIZE=0)"
    return DatabaseError(message, sqlstate=state or None, job_id=job_id)
