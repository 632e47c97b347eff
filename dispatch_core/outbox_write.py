"""Write events on a connection that belongs to somebody else, in a transaction that does.

Nothing of that connection is relied on or changed. What is sent is one statement of ASCII text by the simple query
protocol, with every value in it as hexadecimal digits or as a number: so no codec of the caller's is asked, no prepared
statement is made that could be stale after a migration and abort his transaction, and neither search_path nor
standard_conforming_strings nor a transaction pooler matters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol
from uuid import UUID

from dispatch_core import codec
from dispatch_core.database import in_transaction, mapped_errors
from dispatch_core.errors import (
    DatabaseError,
    InvalidInputError,
    SchemaMismatchError,
    TenancyUnboundError,
    TransactionRequiredError,
)
from dispatch_core.ids import new_id
from dispatch_core.outbox_models import OutboxMessage
from dispatch_core.requests import duration

__all__ = ["MAX_PAYLOAD_BYTES", "WritingConnection", "write_event", "write_events"]

MAX_PAYLOAD_BYTES: Final = 1024 * 1024

_MAX_DELAY_SECONDS: Final = 10_000 * 86400.0
_STATEMENT_BYTES: Final = 4 * 1024 * 1024

_READ_ONLY: Final = "25006"
_NULL: Final = "null"
_ENQUEUE: Final = "select relay.outbox_enqueue("
_ENQUEUE_MANY: Final = "select relay.outbox_enqueue_many("


class WritingConnection(Protocol):
    """What is needed of a connection: asyncpg's own, or a pool's proxy of one."""

    def is_in_transaction(self) -> bool: ...

    async def execute(self, query: str, /) -> str: ...


async def write_event(
    conn: WritingConnection, message: OutboxMessage, *, tenant: str | None, notify: bool, max_payload_bytes: int
) -> UUID:
    """Write one event; see `Outbox.enqueue`."""
    event_id = new_id()
    kind, payload, key, delay = _checked(message, max_payload_bytes)
    values = (
        _text(kind),
        f"{_text(payload)}::pg_catalog.jsonb",
        _NULL if key is None else _text(key),
        _NULL if delay is None else f"'{_microseconds(delay)} microseconds'::pg_catalog.interval",
        _tenant(tenant),
        f"'{event_id}'::pg_catalog.uuid",
        "true" if notify else "false",
    )
    await _send(conn, _ENQUEUE + ", ".join(values) + ")")
    return event_id


async def write_events(
    conn: WritingConnection,
    messages: Sequence[OutboxMessage],
    *,
    tenant: str | None,
    notify: bool,
    max_payload_bytes: int,
) -> list[UUID]:
    """Write events; see `Outbox.enqueue_many`."""
    ids: list[UUID] = []
    rows: list[bytes] = []
    # All are checked before any is sent.
    for message in messages:
        event_id = new_id()
        ids.append(event_id)
        rows.append(_row(event_id, *_checked(message, max_payload_bytes)))
    name = _tenant(tenant)
    if not rows:
        _require_transaction(conn)
    for chunk in _chunks(rows):
        events = _text(b"[" + b",".join(chunk) + b"]")
        flag = "true" if notify else "false"
        await _send(conn, f"{_ENQUEUE_MANY}{name}, {events}::pg_catalog.jsonb, {flag})")
    return ids


async def _send(conn: WritingConnection, statement: str) -> None:
    _require_transaction(conn)
    try:
        with mapped_errors():
            await conn.execute(statement)
    except DatabaseError as error:
        if error.sqlstate == _READ_ONLY:  # elsewhere the sign of a primary that is none any more
            raise TransactionRequiredError("an event cannot be written in a transaction that is read only") from error
        raise
    except SchemaMismatchError as error:  # of the whole schema or of a function: it is this room that a writer needs
        mend = "relay-dispatch db migrate --only outbox"
        raise SchemaMismatchError(
            f"the room outbox of schema relay is not in this database, or not the one of this version: run: {mend}"
        ) from error


def _require_transaction(conn: WritingConnection) -> None:
    # Without one, each statement would commit by itself, and the event would be there whatever became of the order.
    if not in_transaction(conn):
        raise TransactionRequiredError


def _checked(message: OutboxMessage, max_payload_bytes: int) -> tuple[str, bytes, str | None, timedelta | None]:
    if not isinstance(message, OutboxMessage):
        raise InvalidInputError(f"an event must be an OutboxMessage, not {type(message).__name__}")
    return (
        codec.check_name("kind", message.kind),
        codec.encode_payload(message.payload, max_payload_bytes),
        None if message.key is None else codec.check_name("key", message.key),
        None if message.delay is None else duration("delay", message.delay, _MAX_DELAY_SECONDS),
    )


def _row(event_id: UUID, kind: str, payload: bytes, key: str | None, delay: timedelta | None) -> bytes:
    fields: dict[str, Any] = {"id": str(event_id), "kind": kind}
    if key is not None:
        fields["key"] = key
    if delay is not None:
        fields["delay_ms"] = _microseconds(delay) / 1000
    # The payload is JSON text already; it goes in as it is, with all its digits.
    return json.dumps(fields)[:-1].encode() + b', "payload": ' + payload + b"}"


def _chunks(rows: Sequence[bytes]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size = 0
    for row in rows:
        if chunk and size + len(row) > _STATEMENT_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += len(row)
    if chunk:
        yield chunk


def _tenant(tenant: str | None) -> str:
    if tenant is None:
        return _NULL
    if tenant == "":
        raise TenancyUnboundError("'' is no tenant")
    return _text(codec.check_name("tenant", tenant))


def _text(value: str | bytes) -> str:
    raw = value.encode() if isinstance(value, str) else value
    return f"pg_catalog.convert_from(pg_catalog.decode('{raw.hex()}', 'hex'), 'UTF8')"


def _microseconds(value: timedelta) -> int:
    return value // timedelta(microseconds=1)
