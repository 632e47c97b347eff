"""Check what callers give for durable jobs, before any SQL, and name the field that is wrong.

Whatever comes back from here PostgreSQL can store, and will give back as it was.
"""

from __future__ import annotations

import json as standard_json
import math
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, TypeVar
from uuid import UUID

from dispatch_core import codec
from dispatch_core.durable_models import ChunkSpec, JobLease, RowError
from dispatch_core.errors import InvalidDeadlineError, InvalidInputError, InvalidNameError, InvalidPayloadError

__all__ = [
    "MAX_BIGINT",
    "MAX_DETAIL_BYTES",
    "MAX_TEXT_BYTES",
    "chunks_json",
    "count",
    "count_or_none",
    "event_json",
    "event_type",
    "extra_json",
    "flag",
    "identity",
    "json_text",
    "lease_of",
    "name",
    "names",
    "number",
    "one_of",
    "row_errors_json",
    "some_of",
    "span",
    "text_or_none",
]

MAX_BIGINT: Final = 2**63 - 1
MAX_TEXT_BYTES: Final = 2000
MAX_DETAIL_BYTES: Final = 65536
"""Of an event or a bad row: whoever reads them gets a thousand in a page."""
_MAX_CODE_BYTES: Final = 200
_MAX_SECONDS: Final = 10_000 * 86400.0

_Word = TypeVar("_Word", bound=StrEnum)


def identity(field: str, value: object) -> UUID:
    """Return a UUID as it is."""
    if not isinstance(value, UUID):
        raise InvalidInputError(f"{field} must be a UUID, not {type(value).__name__}")
    return value


def name(field: str, value: object) -> str:
    """Return a name: 1 to 200 bytes. Raises: InvalidNameError."""
    return codec.check_name(field, value)


def names(field: str, values: object) -> list[str]:
    """Return names, one at least."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidInputError(f"{field} must be a list of names, not {type(values).__name__}")
    found = [codec.check_name(f"an item of {field}", value) for value in values]
    if not found:
        raise InvalidInputError(f"{field} must not be empty")
    return found


def text_or_none(field: str, value: object, limit: int = MAX_TEXT_BYTES) -> str | None:
    """Return text that PostgreSQL can store, whole or refused: it is evidence. Raises: InvalidNameError."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidNameError(f"{field} must be a str, not {type(value).__name__}")
    plain = str.__str__(value)
    try:
        size = len(plain.encode())
    except UnicodeEncodeError:
        raise InvalidNameError(f"{field} holds a lone surrogate, which PostgreSQL cannot store") from None
    if "\0" in plain:
        raise InvalidNameError(f"{field} holds a NUL character, which PostgreSQL cannot store")
    if size > limit:
        raise InvalidNameError(f"{field} has {size} bytes in UTF-8; at most {limit} are possible")
    return plain


def flag(field: str, value: object) -> bool:
    """Return a bool as it is: what only is true or false by its length is a mistake."""
    if not isinstance(value, bool):
        raise InvalidInputError(f"{field} must be true or false, not {type(value).__name__}")
    return value


def number(field: str, value: object, low: int = -MAX_BIGINT, high: int = MAX_BIGINT) -> int:
    """Return an int within bounds. (The lowest bigint has no opposite, so it is out.)"""
    if type(value) is int and low <= value <= high:
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError(f"{field} must be an int, not {type(value).__name__}")
    if not low <= value <= high:
        raise InvalidInputError(f"{field} must be from {low} to {high}, not {codec.sanitize(value, 40)}")
    return int(value)


def count(field: str, value: object) -> int:
    """Return a number that is not negative."""
    return number(field, value, 0)


def count_or_none(field: str, value: object) -> int | None:
    """Return a number that is not negative, or None."""
    return None if value is None else number(field, value, 0)


def span(field: str, value: object, *, zero: bool = False) -> timedelta:
    """Return seconds or a timedelta as a time. Raises: InvalidDeadlineError."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    else:
        raise InvalidDeadlineError(f"{field} must be seconds or a timedelta, not {type(value).__name__}")
    if not 0 <= seconds <= _MAX_SECONDS or (seconds == 0 and not zero):
        raise InvalidDeadlineError(
            f"{field} must be {'from 0' if zero else 'above 0'} to {_MAX_SECONDS:.0f} seconds, not {seconds}"
        )
    # Rounded up: PostgreSQL counts microseconds, and a positive time must not become none.
    return timedelta(microseconds=math.ceil(seconds * 1_000_000))


def one_of(field: str, value: object, kind: type[_Word], but: Collection[_Word] = ()) -> _Word:
    """Return a member of an enum, given as itself or as its value."""
    try:
        found = kind(value)  # type: ignore[arg-type]  # whatever it is
    except ValueError:
        found = None
    if found is None or found in but:
        allowed = ", ".join(word for word in kind if word not in but)
        raise InvalidInputError(f"{field} must be one of {allowed}, not {codec.sanitize(repr(value), 60)}")
    return found


def some_of(field: str, values: object, kind: type[_Word]) -> list[_Word]:
    """Return members of an enum: one, or several."""
    if isinstance(values, str):
        return [one_of(field, values, kind)]
    if not isinstance(values, Iterable):
        raise InvalidInputError(f"{field} must be one or several of {', '.join(kind)}, not {type(values).__name__}")
    found = [one_of(f"an item of {field}", value, kind) for value in values]
    if not found:
        raise InvalidInputError(f"{field} must not be empty")
    return found


def json_text(field: str, value: object, max_bytes: int) -> str:
    """Return any JSON value as text. Raises: InvalidPayloadError."""
    return _json(field, value, max_bytes).decode()


def _json(field: str, value: object, max_bytes: int) -> bytes:
    try:
        return codec.encode_payload(value, max_bytes)
    except InvalidPayloadError as error:
        raise InvalidPayloadError(str(error).replace("the payload", field, 1)) from None


def chunks_json(chunks: Iterable[object], max_payload_bytes: int, first: int = 0) -> list[bytes]:
    """Return each chunk, a `ChunkSpec` or its payload, as what `relay.durable_insert_chunks` takes for one.

    `first` is what the numbers in errors begin at.
    """
    # The payload is JSON text already; it goes in as it is, with all its digits.
    found = []
    for n, chunk in enumerate(chunks, first):
        spec = chunk if isinstance(chunk, ChunkSpec) else ChunkSpec(chunk)
        payload = _json(f"the payload of chunks[{n}]", spec.payload, max_payload_bytes)
        rows = b"" if spec.rows is None else b', "rows": %d' % count(f"rows of chunks[{n}]", spec.rows)
        found.append(b'{"payload": ' + payload + rows + b"}")
    return found


def row_errors_json(errors: Iterable[object], max_data_bytes: int) -> list[bytes]:
    """Return each row error as `relay.durable_row_errors_add` takes it; a message is cut at 2000 bytes."""
    found = []
    for n, error in enumerate(errors):
        if not isinstance(error, RowError):
            raise InvalidInputError(f"errors[{n}] must be a RowError, not {type(error).__name__}")
        fields: dict[str, Any] = {"row": number(f"row of errors[{n}]", error.row)}
        fields["code"] = text_or_none(f"code of errors[{n}]", error.code, _MAX_CODE_BYTES) or ""
        fields["message"] = codec.sanitize(error.message, MAX_TEXT_BYTES)
        text = standard_json.dumps(fields).encode()
        if error.data is not None:
            data = _json(f"data of errors[{n}]", error.data, min(max_data_bytes, MAX_DETAIL_BYTES))
            text = text[:-1] + b', "data": ' + data + b"}"
        found.append(text)
    return found


def extra_json(field: str, extra: object, allowed: Mapping[str, str], max_bytes: int) -> str:
    """Return columns to be written as JSON, each by its kind in `allowed`: number, text, json, positive, reset."""
    if extra is None:
        return "{}"
    if not isinstance(extra, Mapping):
        raise InvalidInputError(f"{field} must be a map of columns, not {type(extra).__name__}")
    parts = []
    for column, value in extra.items():
        kind = allowed.get(column) if isinstance(column, str) else None
        where = f"{field}[{codec.sanitize(repr(column), 60)}]"
        if kind is None:
            raise InvalidInputError(f"{where} cannot be written; {', '.join(allowed)} can")
        if kind == "json":
            text = json_text(where, value, max_bytes)
        elif kind == "text":
            text = standard_json.dumps(text_or_none(where, value))
        elif kind == "reset":
            if value != "reset":
                raise InvalidInputError(f"{where} can only be 'reset'")
            text = '"reset"'
        else:
            text = str(number(where, value, 1 if kind == "positive" else -MAX_BIGINT))
        parts.append(f"{standard_json.dumps(column)}: {text}")
    return f"{{{', '.join(parts)}}}"


def event_type(field: str, value: object) -> str:
    """Return what an event may be called: 1 to 100 bytes."""
    found = text_or_none(field, value, 100)
    if not found:
        raise InvalidNameError(f"{field} must be a str of 1 to 100 bytes")
    return found


def event_json(event: object, max_bytes: int) -> str:
    """Return an event that is told with a change of status as JSON: its type, and what else it may have."""
    if not isinstance(event, Mapping):
        raise InvalidInputError(f"event must be a map, not {type(event).__name__}")
    unknown = [key for key in event if key not in ("type", "seq", "actor", "channel", "holder", "detail")]
    if unknown:
        raise InvalidInputError(f"event has no field {codec.sanitize(repr(unknown[0]), 60)}")
    fields: dict[str, Any] = {"type": event_type("type of event", event.get("type"))}
    if event.get("seq") is not None:
        fields["seq"] = number("seq of event", event["seq"])
    for key in ("actor", "channel", "holder"):
        fields[key] = text_or_none(f"{key} of event", event.get(key))
    text = standard_json.dumps(fields)
    if event.get("detail") is not None:
        detail = json_text("detail of event", event["detail"], min(max_bytes, MAX_DETAIL_BYTES))
        text = f'{text[:-1]}, "detail": {detail}}}'
    return text


def lease_of(value: object) -> JobLease:
    """Return a lease as it is."""
    if not isinstance(value, JobLease):
        raise InvalidInputError(f"lease must be a JobLease, not {type(value).__name__}")
    return value
