"""The store of durable jobs: queries by an allow-list; what is not in it is refused before any SQL."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from dispatch_core import DurableJobStore, InvalidInputError, JobStatus, RowError
from dispatch_core.database import Database
from dispatch_core.durable_query import OPERATORS, QUERY_COLUMNS, filter_json
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.protocol import TENANT, Connection
from tests.support.stores import Stores, nothing_written, open_stores

SQL = Path(__file__).parent.parent / "migrations" / "functions" / "77_durable_read.sql"

INJECTIONS = [
    "status = 'x' or true --",
    "'; drop table relay.durable_job; --",
    'kind" or "1"="1',
    "job_id) from relay.durable_job --",
    "payload->>'password'",
    "tenant_id",
    "lease_token",
    "STATUS",
    "status ",
    "",
    "*",
    "pg_sleep(10)",
]


@pytest.fixture
async def stores(database: TestDatabase) -> AsyncIterator[Stores]:
    async with open_stores(database) as stores:
        yield stores


@pytest.fixture
def closed() -> DurableJobStore:
    """A store that can send nothing: what is refused on it is refused before any SQL."""
    return DurableJobStore(Database("postgresql://nobody@localhost:1/nowhere"), TENANT)


async def seqs(stores: Stores, wanted: Any, **options: Any) -> list[int]:
    return [item["seq"] for item in (await stores.gateway.query("chunk", wanted, **options)).items]


# --- what may be asked ------------------------------------------------------------------------------------------------


def test_the_columns_and_operators_are_those_of_the_function() -> None:
    text = SQL.read_text()
    for table, columns in QUERY_COLUMNS.items():
        stated = re.search(rf"when '{table}' then '(\{{.*?\}})'", text, re.DOTALL)
        assert stated is not None
        pairs = dict(re.findall(r'"(\w+)": "(\w+)"', stated[1]))
        # A flag is asked for as text.
        assert pairs == {column: "text" if kind == "flag" else kind for column, kind in columns.items()}, table
    stated = re.search(r"f\.c ->> 'op' not in \((.*?)\)", text)
    assert stated is not None
    assert [word.strip(" '") for word in stated[1].split(",")] == list(OPERATORS)


async def test_each_operator_means_what_it_says(stores: Stores) -> None:
    job_id = await stores.job(6)
    await stores.gateway.set_chunk_statuses(job_id, "pending", "failed", {"last_error": "b"}, seqs=[2])
    await stores.gateway.set_chunk_statuses(job_id, "pending", "failed", {"last_error": "ä"}, seqs=[3])
    assert await seqs(stores, [("seq", "=", 2)]) == [2]
    assert await seqs(stores, [("seq", "<>", 2)]) == [1, 3, 4, 5, 6]
    assert await seqs(stores, [("seq", ">=", 2), ("seq", "<", 5)]) == [2, 3, 4]
    assert await seqs(stores, [("seq", ">", 2), ("seq", "<=", 5)]) == [3, 4, 5]
    assert await seqs(stores, [("seq", "in", [6, 1, 99])]) == [1, 6]
    assert await seqs(stores, [("seq", "in", [])]) == []
    assert await seqs(stores, [("last_error", "not_null")]) == [2, 3]
    assert await seqs(stores, [("last_error", "is_null"), ("seq", "<", 3)]) == [1]
    assert await seqs(stores, [("last_error", ">", "b")]) == [3]  # by bytes
    assert await seqs(stores, {"status": "failed", "last_error": ["b", "c"]}) == [2]
    assert await seqs(stores, {"status": ["failed", "done"], "claimed_by": None}) == [2, 3]
    assert await seqs(stores, None) == [1, 2, 3, 4, 5, 6]
    assert await seqs(stores, {}, job_id=uuid4()) == []


async def test_each_kind_of_column_can_be_asked_for(stores: Stores) -> None:
    one = await stores.job(1, idempotent=False, priority=-4, created_by="ann")
    two = await stores.job(1)
    now = datetime.now(UTC)

    async def ids(wanted: Any) -> list[UUID]:
        return [item["job_id"] for item in (await stores.gateway.query("job", wanted)).items]

    assert await ids({"idempotent": False}) == [one]
    assert await ids({"idempotent": True}) == [two]
    assert await ids({"job_id": one, "kind": durable.KIND}) == [one]
    assert await ids([("job_id", "<", two)]) == [one]
    assert await ids([("priority", "<", 0)]) == [one]
    hour = timedelta(hours=1)
    assert await ids([("created_at", ">", now - hour), ("created_at", "<", now + hour)]) == [two, one]
    assert await ids([("started_at", ">", now - hour)]) == []  # a null is only is_null
    assert await ids({"created_by": "ann", "status": JobStatus.QUEUED}) == [one]


async def test_rows_are_typed_and_show_no_fence(stores: Stores) -> None:
    lease = await stores.lease(2, params={"big": 2**70})
    await stores.worker.record_row_errors(lease, [RowError(5, "bad", "m", {"a": 1})])
    (job,) = (await stores.gateway.query("job")).items
    (chunk, _) = (await stores.gateway.query("chunk")).items
    (error,) = (await stores.gateway.query("row_error")).items
    events = (await stores.gateway.query("event")).items
    assert (job["job_id"], job["params"]) == (lease.job_id, {"big": 2**70})
    assert isinstance(job["created_at"], datetime)
    assert (chunk["job_id"], chunk["seq"], chunk["payload"]) == (lease.job_id, 1, {"n": 1})
    assert chunk["lease_expires_at"] == lease.expires_at
    assert (error["row_no"], error["code"], error["data"], error["seq"]) == (5, "bad", {"a": 1}, 1)
    assert [event["type"] for event in events] == ["submitted", "started", "chunk_claimed"]
    shown = {name for row in (job, chunk, error, *events) for name in row}
    assert shown.isdisjoint({"tenant_id", "lease_token", "rank", "job_seq"})


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", QUERY_COLUMNS)
async def test_pages_have_every_row_once(stores: Stores, table: str) -> None:
    jobs = [await stores.job(3) for _ in range(3)]
    for job_id in jobs:
        claimed = await stores.claim(job_id)
        await stores.worker.record_row_errors(claimed.lease, [RowError(n, code) for n in (1, 2) for code in ("a", "b")])
    whole = (await stores.gateway.query(table, limit=1000)).items
    assert len(whole) == {"job": 3, "chunk": 9, "row_error": 12, "event": 9}[table]
    for limit in (1, 2, 3, 5):
        found: list[dict[str, Any]] = []
        after = None
        while True:
            page = await stores.gateway.query(table, limit=limit, after=after)
            found.extend(page.items)
            after = page.after
            if after is None:
                break
            assert len(page.items) == limit
        assert found == whole
    of_one = (await stores.gateway.query(table, job_id=jobs[1], limit=1000)).items
    assert of_one == [row for row in whole if row["job_id"] == jobs[1]]


@pytest.mark.parametrize(
    "after",
    [
        "", "x", "[]", "{}", "null", '["x"]', "[1]", '["01a229ad-d41c-7191-a640-8fdfa7e51d4d", 1]', 5, "[" * 500,
        '["01a229ad-d41c-7191-a640-8fdfa7e51d4d\'; drop table relay.durable_job; --"]', b"[]", ["a"],
    ],
)  # fmt: skip
async def test_what_is_no_cursor_is_refused(closed: DurableJobStore, after: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^after must be"):
        await closed.query("job", after=after)


async def test_a_cursor_of_another_table_is_refused(stores: Stores) -> None:
    await stores.job(2)
    job, chunk = await stores.gateway.query("job", limit=1), await stores.gateway.query("chunk", limit=1)
    for table, after in (("chunk", job.after), ("job", chunk.after), ("event", chunk.after), ("row_error", job.after)):
        assert after is not None
        with pytest.raises(InvalidInputError, match=r"^after must be"):
            await stores.gateway.query(table, after=after)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", INJECTIONS)
@pytest.mark.parametrize("table", QUERY_COLUMNS)
async def test_a_column_that_is_not_of_the_list_is_refused(closed: DurableJobStore, table: str, column: str) -> None:
    for wanted in ({column: "x"}, {column: None}, [(column, "=", "x")]):
        with pytest.raises(InvalidInputError, match="has no column"):
            await closed.query(table, wanted)


@pytest.mark.parametrize(
    "operator", ["", "==", "like", "ilike", "~", "= 1 or true --", "is null", "IN", None, 1, "not in"]
)
async def test_an_operator_that_is_not_of_the_list_is_refused(closed: DurableJobStore, operator: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^filter\[status\]: an operator is one of"):
        await closed.query("job", [("status", operator, "queued")])


@pytest.mark.parametrize(
    "table", ["jobs", "", "durable_job", "job; drop table relay.durable_job", "pg_shadow", None, 1]
)
async def test_a_table_that_is_not_of_the_list_is_refused(closed: DurableJobStore, table: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^table must be one of job, chunk, row_error, event"):
        await closed.query(table)


async def test_an_injection_as_a_value_is_a_value(stores: Stores, admin: Connection) -> None:
    await stores.job(1)
    async with nothing_written(admin):
        for value in INJECTIONS:
            assert (await stores.gateway.query("job", {"kind": value})).items == []
            assert (await stores.gateway.query("job", [("created_by", "in", [value, "\\'; --", "$1"])])).items == []


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("seq", "1", "must be an int"),
        ("seq", True, "must be an int"),
        ("seq", 2**63, "must be from"),
        ("job_id", "01a229ad-d41c-7191-a640-8fdfa7e51d4d", "must be a UUID"),
        ("created_at", "2026-11-29", "must be an aware datetime"),
        ("created_at", datetime(2026, 11, 29), "must be an aware datetime"),  # noqa: DTZ001  (that is the point)
        ("status", 5, "must be a str"),
        ("status", "complete", "must be one of pending, running"),
        ("status", "queued", "must be one of pending, running"),
        ("status", "a\0b", "NUL"),
        ("status", "\ud800", "lone surrogate"),
        ("status", "x" * 2001, "2001 bytes"),
        ("last_error", {"a": 1}, "must be a str"),
    ],
)
async def test_a_value_of_another_kind_is_refused_with_its_column(
    closed: DurableJobStore, column: str, value: Any, words: str
) -> None:
    where = re.escape(f"filter[{column}]")
    with pytest.raises(InvalidInputError, match=rf"^{where}.*{words}"):
        await closed.query("chunk", {column: value})
    with pytest.raises(InvalidInputError, match=rf"^{where}.*{words}"):
        await closed.query("chunk", [(column, "in", [value])])


@pytest.mark.parametrize("wanted", ["status", b"x", 5, [("status",)], [("status", "=")], ["status"], [{"column": "x"}]])
async def test_a_filter_of_another_form_is_refused(closed: DurableJobStore, wanted: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^filter"):
        await closed.query("job", wanted)


@pytest.mark.parametrize("limit", [0, -1, 10_001, 1.0, True, "5"])
async def test_a_limit_out_of_bounds_is_refused(closed: DurableJobStore, limit: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^limit must be"):
        await closed.query("job", limit=limit)


async def test_the_function_refuses_by_itself_what_the_list_has_not(gateway: Connection) -> None:
    """Whoever calls it without us."""
    for table, wanted in (
        ("job", '[{"column": "tenant_id", "op": "=", "value": "acme"}]'),
        ("chunk", '[{"column": "lease_token", "op": "not_null"}]'),
        ("job", '[{"column": "kind", "op": "like", "value": "%"}]'),
        ("job", '["kind"]'),
        ("job", "{}"),
        ("pg_shadow", "[]"),
    ):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await gateway.fetch("select * from relay.durable_query($1, $2, $3)", TENANT, table, wanted)
        assert refused.value.sqlstate == "S2020"


def test_a_filter_is_one_json_document() -> None:
    assert filter_json("job", [("kind", "=", "'\u2028"), ("priority", "in", range(2)), ("status", "is_null")]) == (
        '[{"column": "kind", "op": "=", "value": "\'\\u2028"}, {"column": "priority", "op": "in", "value": [0, 1]},'
        ' {"column": "status", "op": "is_null"}]'
    )
