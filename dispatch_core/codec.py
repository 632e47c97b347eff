"""Turn what callers give into what PostgreSQL can store, and back.

Everything that PostgreSQL cannot store, or that would come back changed, is refused here, before any SQL: U+0000 and
lone surrogates in text, NaN and infinities in JSON, values of the wrong type, bodies over their limit. What PostgreSQL
does store but our readers cannot use (headers that somebody wrote by hand) is found here on the way back.

The only module that imports `orjson`.
"""

from __future__ import annotations

import dataclasses
import enum
import json as standard_json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from uuid import UUID

import orjson

from dispatch_core.errors import (
    InvalidBodyError,
    InvalidHeadersError,
    InvalidNameError,
    InvalidPayloadError,
    MalformedHeadersError,
)

__all__ = [
    "MAX_HEADERS_BYTES",
    "MAX_NAME_BYTES",
    "UNSET",
    "Headers",
    "Unset",
    "check_name",
    "decode_headers",
    "decode_json",
    "decode_payload",
    "encode_body",
    "encode_headers",
    "encode_payload",
    "sanitize",
]

Headers: TypeAlias = Mapping[str, str | Sequence[str]]

MAX_NAME_BYTES: Final = 200
MAX_HEADERS_BYTES: Final = 1024 * 1024
"""Headers travel with every claim, whatever the size of the body, so they have a limit of their own."""


class Unset(enum.Enum):
    """The type of `UNSET`: tells ``json=None``, a JSON null, from no ``json=`` at all."""

    UNSET = enum.auto()


UNSET: Final = Unset.UNSET

# orjson writes U+0000 as these six characters. So does a backslash that is followed by "u0000" (as "\\u0000"):
# finding them is a reason to look closer, not to refuse.
_ESCAPED_NUL: Final = b"\\u0000"


# --- names ----------------------------------------------------------------------------------------------------------


def check_name(kind: str, value: object) -> str:
    """Return `value` as a plain str if it can be a tenant, relay, operation, key or instance id.

    `kind` is the word for it in the error's text.

    Raises: InvalidNameError.
    """
    # The first line is the whole cost for an ordinary name: cheaper than a cache of the names seen.
    if value.__class__ is str and value.isascii() and 0 < len(value) <= MAX_NAME_BYTES and "\0" not in value:
        return value
    if not isinstance(value, str):
        raise InvalidNameError(f"{kind} must be a str, not {type(value).__name__}")
    plain = str.__str__(value)
    if not plain:
        raise InvalidNameError(f"{kind} must not be empty")
    try:
        size = len(plain.encode())
    except UnicodeEncodeError:
        raise InvalidNameError(f"{kind} holds a lone surrogate, which PostgreSQL cannot store") from None
    if size > MAX_NAME_BYTES:
        raise InvalidNameError(f"{kind} has {size} bytes in UTF-8; at most {MAX_NAME_BYTES} are possible")
    if "\0" in plain:
        raise InvalidNameError(f"{kind} holds a NUL character, which PostgreSQL cannot store")
    return plain


# --- headers --------------------------------------------------------------------------------------------------------


def encode_headers(headers: Headers | None) -> str:
    """Return headers as the JSON text that is stored; None and an empty map are ``{}``.

    A map that yields a key more than once (the multi-maps of HTTP frameworks) keeps all its values, as a list.

    Raises: InvalidHeadersError.
    """
    if headers is None:
        return "{}"
    if headers.__class__ is dict:
        if not headers:
            return "{}"
        for value in headers.values():
            if value.__class__ is not str:
                break
        else:
            # orjson itself refuses keys that are no str and lone surrogates; the slow path then finds the words.
            try:
                encoded = orjson.dumps(headers)
            except TypeError:
                pass
            else:
                if _ESCAPED_NUL not in encoded and len(encoded) <= MAX_HEADERS_BYTES:
                    return encoded.decode()
    return _encode_headers_carefully(headers)


def _encode_headers_carefully(headers: object) -> str:
    if not isinstance(headers, Mapping):
        raise InvalidHeadersError(f"headers must be a map of str to str or list of str, not {type(headers).__name__}")
    plain: dict[str, str | list[str]] = {}
    for key, value in headers.items():
        name = _header_text(key, "a header name")
        new: str | list[str]
        if isinstance(value, str):
            new = _header_text(value, f"header {name!r}")
        elif isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
            new = [_header_text(item, f"an item of header {name!r}") for item in value]
        else:
            raise InvalidHeadersError(f"header {name!r} must be str or a list of str, not {type(value).__name__}")
        if name in plain:
            plain[name] = [*_as_list(plain[name]), *_as_list(new)]
        else:
            plain[name] = new
    encoded = orjson.dumps(plain)
    if len(encoded) > MAX_HEADERS_BYTES:
        raise InvalidHeadersError(f"headers have {len(encoded)} bytes; at most {MAX_HEADERS_BYTES} are possible")
    return encoded.decode()


def _header_text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidHeadersError(f"{what} must be str, not {type(value).__name__}")
    plain = str.__str__(value)
    if "\0" in plain:
        raise InvalidHeadersError(f"{what} holds a NUL character, which PostgreSQL cannot store")
    try:
        plain.encode()
    except UnicodeEncodeError:
        raise InvalidHeadersError(f"{what} holds a lone surrogate, which PostgreSQL cannot store") from None
    return plain


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def decode_headers(text: str | None, job_id: UUID) -> dict[str, str | list[str]]:
    """Return stored headers as a new map.

    Raises: MalformedHeadersError, with the job's id, where they are anything else than a map of str to str or
    list of str; never for what `encode_headers` wrote.
    """
    if text == "{}":
        return {}
    if text is None:
        raise MalformedHeadersError(job_id=job_id)
    try:
        headers = orjson.loads(text)
    except ValueError:
        raise MalformedHeadersError(job_id=job_id) from None
    if headers.__class__ is not dict:
        raise MalformedHeadersError(job_id=job_id)
    for value in headers.values():
        if value.__class__ is str:
            continue
        if value.__class__ is not list:
            raise MalformedHeadersError(job_id=job_id)
        for item in value:
            if item.__class__ is not str:
                raise MalformedHeadersError(job_id=job_id)
    result: dict[str, str | list[str]] = headers
    return result


# --- bodies ---------------------------------------------------------------------------------------------------------


def encode_body(
    body: bytes | bytearray | memoryview | str | None = None,
    json: object = UNSET,
    *,
    max_bytes: int,
) -> bytes:
    """Return a body as bytes: bytes as they are, str in UTF-8, `json` as JSON, nothing as ``b""``.

    Raises: InvalidBodyError for both at once, a wrong type, NaN, an infinity, or more than `max_bytes`.
    """
    if json is not UNSET:
        if body is not None:
            raise InvalidBodyError("give body= or json=, not both")
        encoded = _encode_json(json)
    elif body is None:
        return b""
    elif body.__class__ is bytes:
        encoded = body
    elif isinstance(body, str):
        try:
            encoded = str.__str__(body).encode()
        except UnicodeEncodeError:
            raise InvalidBodyError("the body holds a lone surrogate, which UTF-8 cannot express") from None
    elif isinstance(body, (bytes, bytearray, memoryview)):
        # The limit comes before the copy. A memoryview's len() counts items, not bytes.
        size = body.nbytes if isinstance(body, memoryview) else len(body)
        if size > max_bytes:
            raise InvalidBodyError(f"the body has {size} bytes; at most {max_bytes} are allowed (max_body_bytes)")
        encoded = bytes(body)
    else:
        raise InvalidBodyError(f"a body must be bytes or str (or use json=), not {type(body).__name__}")
    if len(encoded) > max_bytes:
        raise InvalidBodyError(f"the body has {len(encoded)} bytes; at most {max_bytes} are allowed (max_body_bytes)")
    return encoded


def decode_json(body: bytes) -> Any:
    """Return the JSON value that a body holds.

    Raises: InvalidBodyError where it holds none.
    """
    try:
        return orjson.loads(body)
    except ValueError as error:
        raise InvalidBodyError(f"the body is not JSON: {sanitize(error, 200)}") from None


def _encode_json(value: object) -> bytes:
    try:
        encoded = orjson.dumps(value)
    except TypeError as error:
        raise InvalidBodyError(f"json= cannot be encoded: {sanitize(error, 200)}") from None
    # orjson writes NaN and the infinities as null, silently. Only where a null was written is it worth looking.
    if b"null" in encoded:
        _refuse_non_finite(value)
    return encoded


def _refuse_non_finite(value: object) -> None:
    """Walk all that orjson walks; it has refused cycles and more than 254 levels before."""
    rest: list[object] = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                raise InvalidBodyError(f"json= holds {item}, which JSON cannot express")
        elif isinstance(item, enum.Enum):
            rest.append(item.value)
        elif isinstance(item, dict):
            rest.extend(item.values())
        elif isinstance(item, (list, tuple)):
            rest.extend(item)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            rest.extend(_attributes(item))


def _attributes(item: Any) -> Iterable[object]:
    return [getattr(item, field.name) for field in dataclasses.fields(item) if hasattr(item, field.name)]


# --- payloads: JSON that PostgreSQL keeps as jsonb --------------------------------------------------------------------

# An odd number of backslashes before u0000 is the character itself, an even number is the text that looks like it.
_NUL_ITSELF: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")

# orjson makes a float of an integer beyond 64 bits, silently.
_MANY_DIGITS: Final = re.compile(r"[0-9]{19}")


def encode_payload(value: object, max_bytes: int) -> bytes:
    """Return a JSON value as JSON text, which PostgreSQL will store as jsonb without a loss.

    Integers may have any size. jsonb keeps no order of keys, and 1e2 comes back as 100.

    Raises: InvalidPayloadError for what is no JSON value (NaN and the infinities too), NUL, lone surrogates, or more
    than `max_bytes`.
    """
    try:
        encoded = _encode_json(value)
    except InvalidBodyError as refused:
        encoded = _encode_large_integers(value, refused)
    if _ESCAPED_NUL in encoded and _NUL_ITSELF.search(encoded):
        raise InvalidPayloadError("the payload holds a NUL character, which PostgreSQL cannot store")
    if len(encoded) > max_bytes:
        raise InvalidPayloadError(f"the payload has {len(encoded)} bytes; at most {max_bytes} are allowed")
    return encoded


def _encode_large_integers(value: object, refused: InvalidBodyError) -> bytes:
    """Encode what orjson refuses only because of an integer beyond 64 bits; else say why it was refused."""
    reason = str(refused).removeprefix("json= ")
    if "64-bit" not in reason:
        raise InvalidPayloadError(f"the payload {reason}") from None
    try:
        text = standard_json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidPayloadError(f"the payload cannot be encoded: {sanitize(error, 200)}") from None


def decode_payload(text: str) -> Any:
    """Return the JSON value that a stored payload is, integers of any size among it."""
    if _MANY_DIGITS.search(text):
        return standard_json.loads(text)
    return orjson.loads(text)


# --- text that must be storable whatever it is ----------------------------------------------------------------------


def sanitize(text: object, limit: int = 2000) -> str:
    """Return `text` as something that PostgreSQL stores: no NUL, no lone surrogate, at most `limit` bytes of UTF-8.

    Never raises, not even where ``str(text)`` does: this writes the reason why a job failed, and failing here would
    lose that the job is over.
    """
    try:
        # A subclass of str may override anything; str.__str__ gives the characters themselves.
        plain = str.__str__(text if isinstance(text, str) else str(text))
    except BaseException as error:  # noqa: BLE001  str() runs the handler's code, which may raise even SystemExit
        plain = f"<{type(text).__name__}: its text is not available, str() raised {type(error).__name__}>"
    # A character has at least one byte, so this bounds the work before any copy is encoded.
    plain = plain[: limit + 1].replace("\0", "\N{REPLACEMENT CHARACTER}")
    try:
        encoded = plain.encode()
    except UnicodeEncodeError:
        # UTF-16 joins a pair of surrogates into its character and leaves the lone ones to be replaced.
        plain = plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        encoded = plain.encode()
    if len(encoded) <= limit:
        return plain
    ellipsis = "…" if limit >= 3 else ""
    return encoded[: max(limit - len(ellipsis.encode()), 0)].decode("utf-8", "ignore") + ellipsis
