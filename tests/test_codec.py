"""The codec: what PostgreSQL cannot store is refused before any SQL, and what it can comes back as it was."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch_core.codec import (
    MAX_HEADERS_BYTES,
    UNSET,
    check_name,
    decode_headers,
    decode_json,
    encode_body,
    encode_headers,
    sanitize,
)
from dispatch_core.errors import InvalidBodyError, InvalidHeadersError, InvalidNameError, MalformedHeadersError

JOB = UUID(int=7)
DEEP = "[" * 3000 + "]" * 3000
LIMIT = 1000

storable_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
storable_headers = st.dictionaries(storable_text, storable_text | st.lists(storable_text))
any_text = st.text(st.characters())


class Text(str):
    """A str of another class, whose methods are not to be trusted."""

    __slots__ = ()

    def __str__(self) -> str:
        return "something else"

    def encode(self, *args: Any, **kwargs: Any) -> bytes:
        return b"something else"


class Colour(enum.StrEnum):
    RED = "red"


class Pairs(Mapping[str, Any]):
    """As the headers of an HTTP framework: one key may come several times."""

    def __init__(self, *pairs: tuple[str, Any]) -> None:
        self._pairs = pairs

    def __getitem__(self, key: str) -> Any:
        return next(value for name, value in self._pairs if name == key)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def items(self) -> Any:
        return list(self._pairs)


# --- names ---


@pytest.mark.parametrize("name", ["a", "x" * 200, "é" * 100, "with spaces, quotes ' \" and %", "\\u0000", "0", "\x01"])
def test_a_name_of_1_to_200_bytes_passes_unchanged(name: str) -> None:
    assert check_name("tenant", name) == name


@pytest.mark.case("C34")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "empty"),
        ("x" * 201, "201 bytes"),
        ("é" * 101, "202 bytes"),
        ("a\0b", "NUL"),
        ("é\0", "NUL"),
        ("\ud800", "surrogate"),
        (None, "NoneType"),
        (b"acme", "bytes"),
        (5, "int"),
        (["acme"], "list"),
    ],
)
def test_a_name_that_cannot_be_stored_is_refused_with_its_reason(name: object, reason: str) -> None:
    with pytest.raises(InvalidNameError, match=reason) as caught:
        check_name("tenant", name)
    assert str(caught.value).startswith("tenant ")
    assert isinstance(caught.value, ValueError)
    assert caught.value.code == "S2R-NAME-INVALID"


def test_a_name_of_a_str_subclass_becomes_a_plain_str() -> None:
    for given_name, plain in ((Text("acme"), "acme"), (Colour.RED, "red")):
        name = check_name("tenant", given_name)
        assert type(name) is str
        assert name == plain


@given(any_text)
def test_a_name_that_is_accepted_can_be_stored(name: str) -> None:
    try:
        accepted = check_name("key", name)
    except InvalidNameError:
        return
    assert 0 < len(accepted.encode()) <= 200
    assert "\0" not in accepted


# --- headers ---


@given(storable_headers)
def test_headers_come_back_as_they_were(headers: dict[str, str | list[str]]) -> None:
    assert decode_headers(encode_headers(headers), JOB) == headers


@pytest.mark.parametrize("headers", [None, {}, MappingProxyType({}), Pairs()])
def test_no_headers_are_an_empty_map(headers: Any) -> None:
    assert encode_headers(headers) == "{}"


@pytest.mark.case("C34")
@pytest.mark.parametrize(
    "headers",
    [
        [],
        "",
        0,
        False,
        [("a", "b")],
        {"a": 1},
        {"a": None},
        {"a": b"b"},
        {"a": {"b": "c"}},
        {"a": ["b", 1]},
        {"a": ["b", None]},
        {"a": [["b"]]},
        {"a": bytearray(b"b")},
        {"a": {"b"}},
        {1: "b"},
        {None: "b"},
        {b"a": "b"},
        {UUID(int=1): "b"},
        {"a": "b\0"},
        {"a\0": "b"},
        {"a": ["b\0"]},
        {"a": "\ud800"},
        {"\udfff": "b"},
        {"a": ["b", "\ud800"]},
        {"a": "x" * MAX_HEADERS_BYTES},
        {"a": ["x" * MAX_HEADERS_BYTES]},
    ],
)
def test_headers_that_cannot_be_stored_are_refused(headers: Any) -> None:
    with pytest.raises(InvalidHeadersError) as caught:
        encode_headers(headers)
    assert isinstance(caught.value, ValueError)
    assert caught.value.code == "S2R-HEADERS-INVALID"
    assert len(str(caught.value)) < 200


@pytest.mark.case("C34")
def test_the_six_characters_of_an_escaped_nul_are_ordinary_text() -> None:
    headers: dict[str, Any] = {"\\u0000": "\\u0000", "list": ["\\u0000", "\\\\u0000"]}
    assert decode_headers(encode_headers(headers), JOB) == headers


def test_headers_of_any_mapping_and_sequence_type_are_stored_as_plain_ones() -> None:
    assert encode_headers(MappingProxyType({"a": ("b", "c")})) == '{"a":["b","c"]}'
    assert encode_headers({Text("a"): Text("b"), "c": Colour.RED}) == '{"a":"b","c":"red"}'


def test_a_header_that_comes_several_times_keeps_all_its_values() -> None:
    headers = Pairs(("set-cookie", "a"), ("x", "1"), ("set-cookie", "b"), ("set-cookie", ["c", "d"]))
    assert encode_headers(headers) == '{"set-cookie":["a","b","c","d"],"x":"1"}'


@pytest.mark.parametrize(
    "stored",
    [
        "[]",
        "null",
        '"a"',
        "1",
        '{"a":1}',
        '{"a":null}',
        '{"a":[1]}',
        '{"a":[["b"]]}',
        '{"a":{"b":"c"}}',
        "{",
        "",
        None,
        DEEP,
    ],
)
def test_stored_headers_that_are_malformed_name_their_job(stored: str | None) -> None:
    with pytest.raises(MalformedHeadersError) as caught:
        decode_headers(stored, JOB)
    assert caught.value.job_id == JOB
    assert caught.value.code == "S2R-HEADERS-INVALID"
    assert caught.value.__cause__ is None


def test_decoded_headers_belong_to_the_caller() -> None:
    decode_headers("{}", JOB)["a"] = "b"
    assert decode_headers("{}", JOB) == {}


async def test_encoded_headers_survive_jsonb(admin: asyncpg.Connection[Any]) -> None:
    headers: dict[str, Any] = {"é": "\x01\x1f\x7f", "\\u0000": ["", "\U0001f600", "\u2028"], "": ""}
    stored = await admin.fetchval("select $1::jsonb", encode_headers(headers))
    assert decode_headers(stored, JOB) == headers


# --- bodies ---


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        (None, b""),
        (b"", b""),
        (b"\0\xff", b"\0\xff"),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abc"), b"abc"),
        (memoryview(b"abcdef")[::2], b"ace"),
        ("é\0", "é\0".encode()),
        (Text("é"), "é".encode()),
    ],
)
def test_a_body_is_stored_as_its_bytes(body: Any, stored: bytes) -> None:
    encoded = encode_body(body, max_bytes=LIMIT)
    assert type(encoded) is bytes
    assert encoded == stored


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(2**63), 2**64 - 1, 0.5, "é\0", [], {}, {"a": [None, {"b": "null"}]}, [1, [2, [3]]]],
)
def test_json_comes_back_as_it_was(value: Any) -> None:
    assert decode_json(encode_body(json=value, max_bytes=LIMIT)) == value


def test_json_none_is_null_and_no_json_is_an_empty_body() -> None:
    assert encode_body(json=None, max_bytes=LIMIT) == b"null"
    assert encode_body(json=UNSET, max_bytes=LIMIT) == b""


@dataclass
class Point:
    x: float
    y: float | None = None


class Scale(enum.Enum):
    BROKEN = math.nan
    WHOLE = 1.0


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        [None, {"a": (1.0, math.nan)}],
        {"a": {"b": [math.inf]}},
        Point(1.0, math.nan),
        [Point(math.inf)],
        {"a": Scale.BROKEN},
    ],
)
def test_json_with_nan_or_an_infinity_is_refused(value: Any) -> None:
    with pytest.raises(InvalidBodyError, match="JSON cannot express"):
        encode_body(json=value, max_bytes=LIMIT)


def test_json_takes_what_has_one_obvious_form() -> None:
    value = {"at": datetime(2026, 1, 2, tzinfo=UTC), "id": JOB, "point": Point(1.5), "scale": Scale.WHOLE}
    assert decode_json(encode_body(json=value, max_bytes=LIMIT)) == {
        "at": "2026-01-02T00:00:00+00:00",
        "id": str(JOB),
        "point": {"x": 1.5, "y": None},
        "scale": 1.0,
    }


cycle: list[Any] = []
cycle.append(cycle)


@pytest.mark.parametrize(
    "value", [object(), {1: "a"}, {None: 1}, b"a", {"a": {1, 2}}, 2**64, "\ud800", {"\ud800": 1}, cycle, 1j]
)
def test_json_that_cannot_be_encoded_is_refused(value: Any) -> None:
    with pytest.raises(InvalidBodyError) as caught:
        encode_body(json=value, max_bytes=LIMIT)
    assert caught.value.code == "S2R-BODY-INVALID"


@pytest.mark.parametrize("body", [5, 1.5, [], {}, object(), JOB, True])
def test_a_body_of_another_type_is_refused(body: Any) -> None:
    with pytest.raises(InvalidBodyError, match=type(body).__name__):
        encode_body(body, max_bytes=LIMIT)


def test_a_body_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidBodyError, match="surrogate"):
        encode_body("\ud800", max_bytes=LIMIT)


@pytest.mark.parametrize("body", [None, b"", "x"])
def test_body_and_json_together_are_refused_also_where_the_body_is_empty(body: Any) -> None:
    if body is None:
        assert encode_body(body, 1, max_bytes=LIMIT) == b"1"
        return
    with pytest.raises(InvalidBodyError, match="not both"):
        encode_body(body, None, max_bytes=LIMIT)


@pytest.mark.parametrize(
    ("body", "json"),
    [(b"x" * 11, UNSET), ("é" * 6, UNSET), (bytearray(11), UNSET), (memoryview(bytes(11)), UNSET), (None, "x" * 9)],
)
def test_a_body_above_the_limit_is_refused_by_its_bytes(body: Any, json: Any) -> None:
    with pytest.raises(InvalidBodyError, match="at most 10 "):
        encode_body(body, json, max_bytes=10)


def test_a_body_at_the_limit_passes() -> None:
    assert len(encode_body("é" * 5, max_bytes=10)) == 10


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"NaN", b"{'a': 1}"])
def test_a_body_that_is_no_json_says_so(body: bytes) -> None:
    with pytest.raises(InvalidBodyError, match="not JSON"):
        decode_json(body)


# --- text that must be storable ---


@given(any_text, st.integers(0, 60))
def test_sanitized_text_can_always_be_stored_within_its_limit(text: str, limit: int) -> None:
    stored = sanitize(text, limit)
    assert len(stored.encode()) <= limit
    assert "\0" not in stored


@given(storable_text)
def test_storable_text_within_the_limit_is_not_changed_by_sanitizing(text: str) -> None:
    assert sanitize(text, 10_000) == text


def test_sanitizing_joins_pairs_of_surrogates_and_replaces_lone_ones() -> None:
    assert sanitize("\ud83d\ude00 \ud800 \0") == "\U0001f600 \N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}"


@pytest.mark.case("C29")
@pytest.mark.parametrize(
    "raised", [ValueError, RecursionError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
def test_sanitizing_never_raises_whatever_str_raises(raised: type[BaseException]) -> None:
    class HostileError(Exception):
        def __str__(self) -> str:
            raise raised("no")

    assert raised.__name__ in sanitize(HostileError())


def test_sanitizing_uses_the_characters_of_a_str_subclass_and_not_its_methods() -> None:
    class TrickyError(Exception):
        def __str__(self) -> str:
            return Text("really\0")

    assert sanitize(Text("real")) == "real"
    assert sanitize(TrickyError()) == "really\N{REPLACEMENT CHARACTER}"


def test_sanitized_text_is_cut_between_characters_and_shows_it() -> None:
    assert sanitize("é" * 10, 10) == "ééé…"
    assert sanitize("x" * 10, 10) == "x" * 10
    assert sanitize(uuid4(), 2) != ""
