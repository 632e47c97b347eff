"""Values on their way over somebody else's connection: each comes back as it went, whatever is in it."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatch_core import DatabaseBusyError, DatabaseError, TransactionRequiredError
from dispatch_core.durable_caller import CallersConnection
from tests.support.protocol import Connection

TEXTS = [
    "",
    "'",
    "''; drop table relay.durable_job; --",
    "$1 $2 $$ $tag$",
    "::text ::uuid::jsonb",
    "\\",
    "\\\\n\\N\\.",
    "\\.",
    "\n\r\t\v\f\b\x01\x1f\x7f\x85\u2028\u2029\ufeff",
    "ü€😀",
    '{"a": "\\u0041\\\\"}',
    "x" * 100_000,
]


class Name(str):
    """A str of somebody else's, that says of itself what it is not."""

    __slots__ = ()

    def __str__(self) -> str:
        return "'; select 1 --"

    def encode(self, *_: Any) -> bytes:
        return b"other"


async def there_and_back(conn: Connection, value: object, kind: str) -> Any:
    """Return what comes back of a value."""
    rows = await CallersConnection(conn, joins=False).fetch("select $1::" + kind + " as value", value)
    assert len(rows) == 1
    return rows[0]["value"]


async def test_text_comes_back_as_it_went(worker: Connection) -> None:
    for text in TEXTS:
        assert await there_and_back(worker, text, "text") == text
    assert await there_and_back(worker, [*TEXTS, None], "text[]") == [*TEXTS, None]


async def test_all_characters_come_back_as_they_went(worker: Connection) -> None:
    """But for NUL and lone surrogates, which no text of PostgreSQL can have."""
    points = [*range(1, 0xD800), *random.Random(7).sample(range(0xE000, 0x110000), 5000)]
    text = "".join(map(chr, points))
    assert await there_and_back(worker, text, "text") == text


async def test_of_a_str_of_somebody_elses_the_characters_go(worker: Connection) -> None:
    assert await there_and_back(worker, Name("plain"), "text") == "plain"


async def test_numbers_ids_times_and_flags_come_back_as_they_went(worker: Connection) -> None:
    for number in (0, 1, -1, 2**63 - 1, -(2**63), 2**53 + 1):
        assert await there_and_back(worker, number, "bigint") == number
    assert await there_and_back(worker, [1, None, -(2**63)], "bigint[]") == [1, None, -(2**63)]
    for flag in (True, False, None):
        assert await there_and_back(worker, flag, "boolean") is flag
    ids = [uuid4(), UUID(int=0)]
    assert await there_and_back(worker, ids, "uuid[]") == [str(job_id) for job_id in ids]
    rows = await CallersConnection(worker, joins=False).fetch(
        "select $1::uuid as job_id, $2::uuid as lease_token", *ids
    )
    assert rows == [{"job_id": ids[0], "lease_token": ids[1]}]
    for empty in ("text[]", "uuid[]", "bigint[]"):
        assert await there_and_back(worker, [], empty) == []
        assert await there_and_back(worker, None, empty) is None


async def test_times_come_back_in_utc_whatever_the_time_zone(worker: Connection) -> None:
    await worker.execute("set timezone = 'Asia/Kolkata'; set datestyle = 'SQL, DMY'")
    moments = [
        datetime(2026, 11, 29, 23, 59, 59, 999999, UTC),
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1850, 6, 1, tzinfo=UTC),  # before there were zones: an offset with seconds
        datetime(2026, 3, 29, 2, 30, tzinfo=timezone(timedelta(hours=-7, minutes=-30))),
    ]
    for moment in moments:
        rows = await CallersConnection(worker, joins=False).fetch("select $1::timestamptz as at", moment)
        assert rows == [{"at": moment}]
        assert rows[0]["at"].tzinfo is UTC


async def test_intervals_come_back_as_they_went(worker: Connection) -> None:
    await worker.execute("set intervalstyle = 'iso_8601'")
    for span in (timedelta(0), timedelta(microseconds=1), timedelta(days=9999, microseconds=-1), timedelta(seconds=-1)):
        found = await CallersConnection(worker, joins=False).fetch(
            "select extract(epoch from $1::interval)::float8 as value", span
        )
        assert found[0]["value"] == pytest.approx(span.total_seconds(), abs=1e-6)


async def test_many_rows_come_in_their_order_and_none_is_none(worker: Connection) -> None:
    fetch = CallersConnection(worker, joins=False).fetch
    rows = await fetch("select n, repeat('\\', 3) as text from generate_series(1, $1::bigint) as n order by n", 5000)
    assert [row["n"] for row in rows] == list(range(1, 5001))
    assert {row["text"] for row in rows} == {"\\\\\\"}
    assert await fetch("select 1 as n where false") == []


async def test_what_the_server_refuses_is_one_of_ours_and_the_connection_goes_on(worker: Connection) -> None:
    fetch = CallersConnection(worker, joins=False).fetch
    with pytest.raises(DatabaseError) as refused:
        await fetch("select 1 / 0 as n")
    assert refused.value.sqlstate == "22012"
    # One that comes when rows are on their way already.
    with pytest.raises(DatabaseError):
        await fetch("select 1 / (3000 - n) as n from generate_series(1, $1::bigint) as n", 5000)
    await worker.execute("set statement_timeout = '50ms'")
    with pytest.raises(DatabaseBusyError):
        await fetch("select pg_sleep(5) is null as n")
    await worker.execute("reset statement_timeout")
    assert await fetch("select 1 as n") == [{"n": 1}]


async def test_a_value_of_another_type_is_a_mistake_of_ours(worker: Connection) -> None:
    with pytest.raises(TypeError):
        await CallersConnection(worker, joins=False).fetch("select $1::text as n", object())
    with pytest.raises(TransactionRequiredError):
        await CallersConnection(worker).fetch("select 1 as n")
