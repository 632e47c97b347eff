"""What may be asked of durable jobs: tables, columns and operators by name, values by kind; all else is refused here.

The same lists stand in `relay.durable_query`, which refuses by itself what is not in them. Names and values travel as
one JSON document, so that nothing of a filter ever is a part of a statement.
"""

from __future__ import annotations

import json as standard_json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, TypeAlias
from uuid import UUID

from dispatch_core import codec
from dispatch_core import durable_input as check
from dispatch_core.durable_models import ChunkStatus, JobStatus
from dispatch_core.errors import InvalidInputError

__all__ = ["OPERATORS", "QUERY_COLUMNS", "QUERY_TABLES", "Filter", "cursor_text", "filter_json", "shown", "table_name"]

Filter: TypeAlias = Mapping[str, Any] | Iterable[tuple[str, str] | tuple[str, str, Any]]
"""Column -> value (a list: one of these; None: is null), or triples (column, operator, value); all must hold."""

_TIMES: Final = ("created_at", "updated_at", "ended_at")
_ROWS: Final = ("rows_total", "rows_done", "rows_failed")


def _columns(**kinds: Iterable[str]) -> dict[str, str]:
    return {column: kind for kind, columns in kinds.items() for column in columns}


QUERY_COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "job": _columns(
        uuid=["job_id"],
        text=["kind", "status", "created_by", "last_error"],
        flag=["idempotent"],
        number=[
            *("max_attempts", "priority", *_ROWS, "chunks_total", "chunks_pending", "chunks_running", "chunks_retry"),
            *("chunks_done", "chunks_failed", "chunks_needs_review", "chunks_cancelled"),
        ],
        time=["counted_at", "started_at", *_TIMES],
    ),
    "chunk": _columns(
        uuid=["job_id"],
        text=["status", "claimed_by", "last_error"],
        number=["seq", "attempts", "lease_version", *_ROWS],
        time=["claimed_at", "lease_expires_at", "available_at", *_TIMES],
    ),
    "row_error": _columns(
        uuid=["job_id"], text=["code", "message"], number=["seq", "row_no", "lease_version"], time=["created_at"]
    ),
    "event": _columns(uuid=["job_id"], text=["type", "actor", "channel", "holder"], number=["seq"], time=["at"]),
}
QUERY_TABLES: Final = tuple(QUERY_COLUMNS)
OPERATORS: Final = ("=", "<>", "<", "<=", ">", ">=", "in", "is_null", "not_null")

_WORDS: Final[Mapping[tuple[str, str], type[StrEnum]]] = {
    ("job", "status"): JobStatus,
    ("chunk", "status"): ChunkStatus,
}
"""Columns of few words: another one would find nothing, and not say why."""

_ALSO_SHOWN: Final = {
    "job": ("params",),
    "chunk": ("payload", "checkpoint", "outcome"),
    "row_error": ("data",),
    "event": ("xid", "n", "detail"),
}
_CURSORS: Final[Mapping[str, tuple[type, ...]]] = {
    "job": (str,),
    "chunk": (str, int),
    "row_error": (str, int, int, str),
    "event": (str, str, int),
}


def table_name(value: object) -> str:
    """Return the name of a table."""
    if not isinstance(value, str) or value not in QUERY_COLUMNS:
        raise InvalidInputError(
            f"table must be one of {', '.join(QUERY_TABLES)}, not {codec.sanitize(repr(value), 60)}"
        )
    return str.__str__(value)


def filter_json(table: str, wanted: Filter | None) -> str:
    """Return a filter as `relay.durable_query` takes it. Raises: InvalidInputError, which names column or operator."""
    columns = QUERY_COLUMNS[table_name(table)]
    conditions = []
    for column, operator, value in _conditions(wanted):
        kind = columns.get(column) if isinstance(column, str) else None
        if kind is None:
            raise InvalidInputError(
                f"filter: {table} has no column {codec.sanitize(repr(column), 60)} to ask for; {', '.join(columns)}"
            )
        if operator not in OPERATORS:
            raise InvalidInputError(
                f"filter[{column}]: an operator is one of {', '.join(OPERATORS)},"
                f" not {codec.sanitize(repr(operator), 60)}"
            )
        condition = {"column": column, "op": operator}
        words, where = _WORDS.get((table, column)), f"filter[{column}]"
        if operator == "in":
            if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
                raise InvalidInputError(f"filter[{column}]: 'in' takes a list, not {type(value).__name__}")
            condition["value"] = [_value(kind, words, where, item) for item in value]
        elif operator not in ("is_null", "not_null"):
            condition["value"] = _value(kind, words, where, value)
        conditions.append(condition)
    return standard_json.dumps(conditions)


def _conditions(wanted: Filter | None) -> Iterable[tuple[str, Any, Any]]:
    if wanted is None:
        return
    if isinstance(wanted, Mapping):
        for column, value in wanted.items():
            if value is None:
                yield column, "is_null", None
            elif isinstance(value, list | tuple | set | frozenset):
                yield column, "in", value
            else:
                yield column, "=", value
        return
    if isinstance(wanted, str | bytes) or not isinstance(wanted, Iterable):
        raise InvalidInputError(f"filter must be a map or a list of conditions, not {type(wanted).__name__}")
    for n, condition in enumerate(wanted):
        if not isinstance(condition, list | tuple) or len(condition) not in (2, 3):
            raise InvalidInputError(f"filter[{n}] must be (column, operator, value)")
        column, operator, *value = condition
        if not value and operator not in ("is_null", "not_null"):
            raise InvalidInputError(f"filter[{n}] must be (column, operator, value)")
        yield column, operator, value[0] if value else None


def _value(kind: str, words: type[StrEnum] | None, where: str, value: object) -> Any:
    found = _VALUES[kind](where, value)
    return found if words is None else check.one_of(where, found, words).value


def _text(where: str, value: object) -> str:
    found = check.text_or_none(where, value)
    if found is None:
        raise InvalidInputError(f"{where} must be a str; for null there is the operator is_null")
    return found


def _time(where: str, value: object) -> str:
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidInputError(f"{where} must be an aware datetime, not {codec.sanitize(repr(value), 60)}")
    return value.isoformat()


def _flag(where: str, value: object) -> str:
    return "true" if check.flag(where, value) else "false"


_VALUES: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "text": _text,
    "number": check.number,
    "flag": _flag,
    "time": _time,
    "uuid": lambda where, value: str(check.identity(where, value)),
}


def cursor_text(table: str, after: object) -> str | None:
    """Return the `after` of a page as it is. Raises: InvalidInputError for anything else."""
    if after is None:
        return None
    kinds = _CURSORS[table_name(table)]
    try:
        parts = standard_json.loads(after) if isinstance(after, str) and len(after) < 2000 else None
        fits = (
            isinstance(parts, list)
            and len(parts) == len(kinds)
            and all(type(part) is kind for part, kind in zip(parts, kinds, strict=True))
            and UUID(parts[0]) is not None
            and all(-check.MAX_BIGINT <= part <= check.MAX_BIGINT for part in parts if type(part) is int)
            and (table != "event" or 0 <= int(parts[1]) < 2**64)
        )
    except (ValueError, RecursionError):
        fits = False
    if not fits:
        raise InvalidInputError(f"after must be the `after` of an earlier page of {table}s")
    # Made anew: what json accepts is more than what jsonb does.
    return standard_json.dumps(parts)


def shown(table: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a row what is for readers: neither the fence of a chunk nor what only orders."""
    columns = (*QUERY_COLUMNS[table], *_ALSO_SHOWN[table])
    return {column: item[column] for column in columns}
