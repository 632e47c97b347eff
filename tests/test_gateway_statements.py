"""How many statements a verb takes, and what they carry: what decides the speed, without a clock."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository, prepare
from dispatch_core.errors import DatabaseUnavailableError, InvalidDeadlineError, InvalidInputError
from dispatch_core.ids import new_id
from dispatch_core.requests import columns
from gateway_sdk import DispatchRequest, DispatchResult, GatewayClient
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import Connection, PlayedRelay, open_client

NEVER = 3600.0


@contextmanager
def statements() -> Iterator[list[str]]:
    """Collect what is sent on every connection of this process: verbs by their name, else the first word."""
    sent: list[str] = []
    connection: Any = asyncpg.connection.Connection
    original = connection._execute

    async def execute(self: Any, query: str, *args: Any, **options: Any) -> Any:
        verb = query.partition("relay.")[2].partition("(")[0]
        sent.append(verb or query.split()[0].lower())
        return await original(self, query, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "_execute", execute)
        yield sent


class Always:
    """In place of RingInside: decided beforehand."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.told: list[bool] = []

    def allows(self) -> bool:
        return self.answer

    def took(self, _seconds: float, rang: bool) -> None:
        self.told.append(rang)

    def round_trip(self, _seconds: float) -> None:
        pass


def decide(client: GatewayClient, *, inside: bool) -> Always:
    assert client._runtime is not None
    decided = Always(inside)
    client._runtime.lanes.enqueueing._ring_inside = decided  # type: ignore[assignment]
    return decided


@pytest.mark.parametrize("inside", [True, False])
async def test_a_lone_enqueue_is_one_statement_and_its_ring_another_only_where_it_may_not_ring_inside(
    database: TestDatabase, worker: Connection, inside: bool
) -> None:
    heard: list[object] = []
    channel = await RelayDispatchRepository(worker, "acme").channel("wake", "erp")
    await worker.add_listener(channel, lambda *_: heard.append(None))
    async with open_client(database.gateway_dsn, sweep_interval_seconds=0) as client:
        acme, decided = client.tenant("acme"), decide(client, inside=inside)
        await acme.enqueue("erp", "Op", notify=False)
        with statements() as sent:
            await acme.enqueue("erp", "Op")
            await eventually(lambda: heard)
    assert sent == (["enqueue"] if inside else ["enqueue", "ring"])
    assert decided.told == [False, inside]


async def test_many_enqueues_at_once_are_a_statement_for_each_full_batch_and_none_rings_inside(
    database: TestDatabase,
) -> None:
    async with open_client(database.gateway_dsn, sweep_interval_seconds=0, enqueue_batch_items=100) as client:
        acme, decided = client.tenant("acme"), decide(client, inside=True)
        await acme.enqueue("erp", "Op")
        with statements() as sent:
            await asyncio.gather(*(acme.enqueue("erp", "Op") for _ in range(300)))
            await eventually(lambda: "ring" in sent)
    assert sent.count("enqueue") == 3
    assert decided.told == [True], "only the one that was alone"


async def test_a_call_is_one_enqueue_and_one_poll(database: TestDatabase, worker: Connection) -> None:
    relay = PlayedRelay(worker, "acme", "erp")
    async with open_client(
        database.gateway_dsn, sweep_interval_seconds=0, poll_interval_seconds=NEVER, probe_seconds=NEVER
    ) as client:
        acme = client.tenant("acme")
        decide(client, inside=True)

        async def call() -> list[str]:
            with statements() as sent:
                answer = asyncio.ensure_future(acme.call("erp", "Op", timeout=30))
                jobs = await eventually(relay.claim)
                # The relay is played in this process too.
                await relay.complete(jobs)
                assert (await answer).attempt == 1
            return [verb for verb in sent if verb in ("enqueue", "poll")]

        await call()  # begins to listen
        await eventually(lambda: acme._runtime.channels.is_listening("acme"))
        assert await call() == ["enqueue", "poll"]


async def test_a_push_of_many_results_is_polled_by_one_statement(database: TestDatabase, worker: Connection) -> None:
    relay = PlayedRelay(worker, "acme", "erp")
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        first = asyncio.ensure_future(acme.call("erp", "Op", timeout=30))
        await relay.complete(await eventually(relay.claim))
        await first
        await eventually(lambda: acme._runtime.channels.is_listening("acme"))
        calls = [asyncio.ensure_future(acme.call("erp", "Op", timeout=30)) for _ in range(150)]
        await eventually(lambda: client.health().enqueued == 151)
        before = client.health().poll_statements
        await relay.complete(await relay.claim(150))
        await asyncio.gather(*calls)
        assert client.health().poll_statements == before + 1


async def test_enqueue_many_is_a_statement_for_each_thousand_in_one_transaction(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn, sweep_interval_seconds=0) as client:
        acme = client.tenant("acme")
        requests = [DispatchRequest("erp", "Op", body=str(n)) for n in range(2500)]
        with statements() as sent:
            ids = await acme.enqueue_many(requests, notify=False)
            assert len(set(ids)) == 2500
            many = sent.copy()
            sent.clear()
            await acme.enqueue_many(requests[:1000], notify=False)
            assert sent == ["enqueue"]
    assert [verb for verb in many if verb == "enqueue"] == ["enqueue"] * 3
    async with open_client(database.gateway_dsn) as client:
        bad = [*requests, DispatchRequest("erp", "Op", max_attempts=0)]
        with pytest.raises(InvalidInputError, match="max_attempts"):
            await client.tenant("acme").enqueue_many(bad)


async def test_what_was_sent_before_a_wrong_request_was_found_is_not_stored(
    database: TestDatabase, admin: Connection
) -> None:
    requests = [*(DispatchRequest("erp", "Op") for _ in range(1500)), DispatchRequest("erp", "")]
    async with open_client(database.gateway_dsn) as client:
        with pytest.raises(InvalidInputError):
            await client.tenant("acme").enqueue_many(requests)
    assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_request") == 0


def test_a_value_that_all_rows_have_is_sent_once_and_a_default_not_at_all() -> None:
    alike = [prepare(DispatchRequest("erp", "Op", body=str(n), ttl=9)) for n in range(3)]
    ids, relays, operations, headers, bodies, attempts, ttls, deadlines, delays = columns(alike)
    assert isinstance(ids, str)
    assert [UUID(text) for text in ids[1:-1].split(",")] == [row.job_id for row in alike]
    assert (relays, operations, ttls) == (["erp"], ["Op"], [timedelta(seconds=9)])
    assert bodies == [b"0", b"1", b"2"]
    assert headers is attempts is deadlines is delays is None
    other = [*alike, prepare(DispatchRequest("crm", "Op", headers={"a": "b"}, ttl=8, delay=1, max_attempts=2))]
    assert [len(column) for column in columns(other) if isinstance(column, list)] == [4, 1, 4, 4, 4, 4, 4]
    assert [len(column) for column in columns(alike[:1]) if isinstance(column, list)] == [1] * 4


_ENQUEUE = "select relay.enqueue('acme', $1, $2, $3, $4, null, $5, $6, null, $7)"


@pytest.mark.parametrize("wrong", range(1, 7))
async def test_an_array_that_is_neither_of_one_nor_of_all_is_refused(gateway: Connection, wrong: int) -> None:
    values: list[Any] = [[new_id() for _ in range(3)], ["erp"], ["Op"], ["{}"], [1], [timedelta(seconds=9)], None]
    values[wrong] = [timedelta(0)] * 2 if values[wrong] is None else values[wrong] * 2
    with pytest.raises(asyncpg.PostgresError) as refused:
        await gateway.fetchval(_ENQUEUE, *values)
    assert refused.value.sqlstate == "S2020"


async def test_one_value_stands_for_all_jobs_and_null_for_the_default(gateway: Connection, admin: Connection) -> None:
    ids = [new_id() for _ in range(3)]
    day = timedelta(days=1)
    assert await gateway.fetchval(_ENQUEUE, ids, ["erp"], ["a", "b", "c"], None, None, [day], None) == []
    # Two of them come again with a new one.
    again = [ids[2], new_id(), ids[0]]
    assert await gateway.fetchval(_ENQUEUE, again, ["erp"], ["x"], ['{"h": "v"}'], [7], [day], [day / 2]) == [
        ids[2],
        ids[0],
    ]
    rows = await admin.fetch(
        "select r.operation, r.request_headers::text, r.request_body, r.max_attempts, q.max_attempts, q.state,"
        " r.expires_at - r.created_at, q.expires_at - q.created_at, q.available_at - q.created_at"
        " from relay.s2r_relay_dispatch_request r join relay.s2r_relay_dispatch_queue q using (tenant_id, job_id)"
        " order by job_id"
    )
    assert [tuple(row) for row in rows] == [
        *((operation, "{}", b"", 1, 1, "ready", day, day, None) for operation in "abc"),
        ("x", '{"h": "v"}', b"", 7, 7, "delayed", day, day, day / 2),
    ]


async def test_a_request_without_headers_is_stored_without_those_of_the_one_before_it(
    database: TestDatabase, admin: Connection
) -> None:
    async with open_client(database.gateway_dsn) as client:
        await client.tenant("acme").enqueue_many(
            [
                DispatchRequest("erp", "A", headers=MappingProxyType({"authorization": "secret"})),
                DispatchRequest("erp", "B"),
                DispatchRequest("erp", "C", headers={"x": "1"}),
                DispatchRequest("erp", "D"),
            ]
        )
    rows = await admin.fetch(
        "select operation, request_headers::text as headers from relay.s2r_relay_dispatch_request order by 1"
    )
    assert [tuple(row) for row in rows] == [
        ("A", '{"authorization": "secret"}'),
        ("B", "{}"),
        ("C", '{"x": "1"}'),
        ("D", "{}"),
    ]


async def test_enqueue_many_on_a_connection_without_a_transaction_stores_all_or_none(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    requests = [DispatchRequest("erp", "Op") for _ in range(1100)]
    late = DispatchRequest("erp", "Op", expires_at=datetime(2001, 1, 1, tzinfo=UTC))
    async with open_client(database.gateway_dsn) as client:
        with pytest.raises(InvalidDeadlineError):
            await client.tenant("acme").enqueue_many([*requests, late], conn=gateway)
        assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_request") == 0
        assert len(await client.tenant("acme").enqueue_many(requests, conn=gateway)) == 1100
    assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_request") == 1100
    assert not gateway.is_in_transaction()


async def test_a_list_that_changes_while_it_is_enqueued_is_taken_as_it_was(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        requests = [DispatchRequest("erp", "Op") for _ in range(2100)]
        task = asyncio.ensure_future(client.tenant("acme").enqueue_many(requests))
        await asyncio.sleep(0)
        requests.clear()
        assert len(set(await task)) == 2100


async def test_enqueues_of_several_tenants_at_once_are_not_alone(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn, sweep_interval_seconds=0) as client:
        decided = decide(client, inside=True)
        await asyncio.gather(*(client.tenant(f"t{n}").enqueue("erp", "Op") for n in range(8)))
    assert len(decided.told) <= 1


async def test_a_call_without_time_left_gets_no_connection_and_costs_the_others_none(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        await client.tenant("acme").poll_status(new_id())
        assert client._runtime is not None
        connections = client._runtime.database
        generation = connections._pool._generation
        with pytest.raises(DatabaseUnavailableError, match="nothing was sent"):
            async with connections.connection(0):
                raise AssertionError
        assert connections._pool._generation == generation


async def test_an_enqueue_of_nothing_stores_nothing(gateway: Connection, admin: Connection) -> None:
    sql = "select relay.enqueue('acme', '{}', $1::text[], $1::text[], null, null, null, '{1 min}', null, null)"
    for names in ([], ["erp"]):
        assert await gateway.fetchval(sql, names) == []
    assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_request") == 0


@pytest.mark.parametrize("lives", [True, False])
async def test_looks_at_one_job_ask_for_it_once_and_those_that_were_given_up_ask_for_nothing(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    asked: list[list[UUID]] = []
    go_on = asyncio.Event()
    poll_places = RelayDispatchRepository.poll_places

    async def held(self: RelayDispatchRepository, ids: Sequence[UUID], **options: Any) -> Any:
        asked.append(list(ids))
        await go_on.wait()
        return await poll_places(self, ids, **options)

    async with open_client(database.gateway_dsn) as client, asyncio.TaskGroup() as group:
        acme = client.tenant("acme")
        job_id, unknown = await acme.enqueue("erp", "Op"), new_id()
        monkeypatch.setattr(RelayDispatchRepository, "poll_places", held)

        def look(at: UUID) -> asyncio.Task[DispatchResult | None]:
            return group.create_task(acme.poll_status(at))

        # Both workers of the lane are at work, and what comes now gathers.
        look(job_id)
        await eventually(lambda: len(asked) == 1)
        look(job_id)
        await eventually(lambda: len(asked) == 2)
        lane = acme._runtime.lanes.poll["acme"]
        gone = [look(new_id()) for _ in range(20)] + [look(job_id)]
        live = [look(at) for at in [job_id] * 50 + [unknown]] if lives else []
        await eventually(lambda: lane.pending == len(gone) + len(live))
        for task in gone:
            task.cancel()
        await asyncio.wait(gone)
        go_on.set()
        results = await asyncio.gather(*live)
        await lane.drain()
        assert [result and result.job_id for result in results] == ([job_id] * 50 + [None] if lives else [])
    assert asked[2:] == ([[job_id, unknown]] if lives else [])


async def test_a_call_that_waits_keeps_few_objects(database: TestDatabase) -> None:
    """The collector looks at each of them again and again: with twice as many it took a third of a busy gateway."""
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client, asyncio.TaskGroup() as group:
        acme = client.tenant("acme")

        async def start(count: int) -> int:
            tasks = [group.create_task(acme.call("erp", "Op", timeout=60)) for _ in range(count)]
            calls.extend(tasks)
            await eventually(lambda: client.health().enqueued == len(calls))
            await eventually(lambda: not any(lane.pending or lane.in_flight for lane in lanes()))
            gc.collect()
            return len(gc.get_objects())

        def lanes() -> list[Any]:
            assert client._runtime is not None
            return [*client._runtime.lanes.enqueue._lanes.values(), *client._runtime.lanes.poll._lanes.values()]

        calls: list[asyncio.Task[DispatchResult]] = []
        before = await start(100)
        # A coroutine, a future and who awaits it, the job, its id, its waits, and the wait; the others are the task's.
        assert (await start(400) - before) / 400 <= 13.5
        for call in calls:
            call.cancel()
