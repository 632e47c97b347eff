"""Call functions on a connection that belongs to somebody else, in a transaction that does.

Nothing of that connection is relied on or changed. What is sent is one COPY of a query, as ASCII text by the simple
query protocol, with every value in it as a literal that needs no quoting; what comes back is one line of JSON a row.
So no codec of the caller's is asked for arguments or results, no prepared statement is made that could be stale after a
migration and abort his transaction or push one of his out of the cache, and neither search_path nor
standard_conforming_strings nor client_encoding nor a transaction pooler matters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol
from uuid import UUID

from dispatch_core import codec
from dispatch_core.database import in_transaction, mapped_errors
from dispatch_core.errors import DatabaseError, TransactionRequiredError

__all__ = ["CallersConnection", "JoinableConnection", "typed"]

_ROWS: Final = ("select pg_catalog.row_to_json(r) from (", ") as r")

_READ_ONLY: Final = "25006"
_PARAMETER: Final = re.compile(r"\$(\d+)")
_TYPE: Final = re.compile(r"::(?=(?:text|jsonb|uuid)\b)")


class JoinableConnection(Protocol):
    """What is needed of a connection: asyncpg's own, or a pool's proxy of one."""

    def is_in_transaction(self) -> bool: ...

    async def copy_from_query(self, query: str, /, *, output: Any, timeout: float | None, encoding: str) -> str: ...


class CallersConnection:
    """The caller's connection, as far as the verbs of a repository need one."""

    __slots__ = ("_conn", "_joins", "_timeout")

    def __init__(self, conn: JoinableConnection, *, joins: bool = True, timeout: float | None = None) -> None:
        """Take the connection. `joins`: it must be in a transaction, or each statement would commit by itself.

        `timeout`: seconds for a statement; None: as the connection has it.
        """
        self._conn = conn
        self._joins = joins
        self._timeout = timeout

    async def fetch(self, sql: str, *args: object) -> list[Any]:
        """Run one statement; return its rows as maps: ids are UUIDs, times aware datetimes, the rest as JSON has it.

        Transaction: joins the caller's. Raises: TransactionRequiredError where there is none; nothing was sent.
        """
        text = _TYPE.sub("::pg_catalog.", _PARAMETER.sub(lambda match: _literal(args[int(match[1]) - 1]), sql))
        received = bytearray()

        async def receive(data: bytes) -> None:
            received.extend(data)

        try:
            with mapped_errors():
                if self._joins and not in_transaction(self._conn):
                    raise TransactionRequiredError
                await self._conn.copy_from_query(
                    text.join(_ROWS), output=receive, encoding="UTF8", timeout=self._timeout
                )
        except DatabaseError as error:
            if self._joins and error.sqlstate == _READ_ONLY:  # elsewhere the sign of a primary that is none any more
                raise TransactionRequiredError("nothing can be written in a transaction that is read only") from error
            raise
        # JSON has no raw control character, so all that COPY has escaped are backslashes.
        lines = received.replace(rb"\\", b"\\").split(b"\n")
        return [typed(codec.decode_payload(line.decode())) for line in lines if line]


def typed(row: dict[str, Any]) -> dict[str, Any]:
    """Have ids and times of a row that is JSON be what the driver makes of them."""
    for column, value in row.items():
        if value is not None:
            if column in ("job_id", "lease_token"):
                row[column] = UUID(value)
            elif column == "at" or column.endswith("_at"):
                row[column] = datetime.fromisoformat(value).astimezone(UTC)
    return row


def _literal(value: object) -> str:
    if value is None:
        return "null"
    kind = type(value)
    if kind is list:
        return _array(value)  # type: ignore[arg-type]
    write = _WRITE.get(kind)
    if write is not None:
        return write(value)
    for base, write in _WRITE.items():
        if isinstance(value, base):
            return write(value)
    raise TypeError(f"no literal for {kind.__name__}")


def _text(value: str) -> str:
    return f"pg_catalog.convert_from(pg_catalog.decode('{str.__str__(value).encode().hex()}', 'hex'), 'UTF8')"


_WRITE: Final[dict[type, Callable[[Any], str]]] = {
    bool: lambda value: "true" if value else "false",
    int: lambda value: f"'{int(value)}'::pg_catalog.int8",
    str: _text,
    UUID: lambda value: f"'{UUID.__str__(value)}'::pg_catalog.uuid",
    timedelta: lambda value: f"'{value // timedelta(microseconds=1)} microseconds'::pg_catalog.interval",
    datetime: lambda value: f"'{value.isoformat()}'::pg_catalog.timestamptz",
}

_ARRAYS: Final[tuple[tuple[type, str], ...]] = ((int, "int8"), (UUID, "uuid"), (str, "text"), (timedelta, "interval"))


def _array(values: Sequence[object]) -> str:
    kind = next((name for kind, name in _ARRAYS if any(isinstance(value, kind) for value in values)), "text")
    return f"array[{','.join(map(_literal, values))}]::pg_catalog.{kind}[]"
