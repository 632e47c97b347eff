"""Channels: names that nobody can guess, told to nobody who is not bound, and rings that go no further (C08, C09)."""

from __future__ import annotations

import itertools
import re
from uuid import uuid4

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import TenancyDeniedError
from tests.support.databases import TestDatabase, new_database
from tests.support.protocol import RELAY, TENANT, Connection, logins

pytestmark = pytest.mark.invariant("I4")

_PAIRS = [
    ("a", "bc"),
    ("ab", "c"),
    ("a", "b:c"),
    ("a:b", "c"),
    ("1:a", "b"),
    ("a", "B"),
    ("a", "b"),
    ("A", "b"),
    ("b", "a"),
    ("a", "x" * 64),
    ("a", "x" * 65),
    ("a", "y" * 63 + "1"),
    ("a", "y" * 63 + "2"),
    ("other", "x" * 64),
    ("a", "漢" * 22),
    ("a", "q\"uo'te"),
    ("a", "dot.ted"),
    ("a", "spa ced"),
    ("a", "per%cent"),
    ("a", "x" * 200),
    ("x" * 200, "a"),
]


async def _wake(connection: Connection, tenant: str, relay: str) -> str:
    return await RelayDispatchRepository(connection, tenant).channel("wake", relay)


@pytest.mark.case("C09")
async def test_channel_names_are_short_lower_case_and_different_for_every_tenant_and_relay(
    gateway: Connection, worker: Connection
) -> None:
    names = [await _wake(worker, tenant, relay) for tenant, relay in _PAIRS]
    results = [await RelayDispatchRepository(gateway, tenant).channel("result") for tenant in {t for t, _ in _PAIRS}]
    for name in (*names, *results):
        assert re.fullmatch(r"s2r_[0-9a-f]{40}", name)
    assert len({*names, *results}) == len(names) + len(results)
    assert names == [await _wake(gateway, tenant, relay) for tenant, relay in _PAIRS], (
        "both sides ask the same function"
    )


async def test_another_installation_has_other_names(database: TestDatabase, template: str, worker: Connection) -> None:
    name = await _wake(worker, TENANT, RELAY)
    async with new_database(database.server) as bare:
        from dispatch_core.migrate import grant, migrate

        await migrate(bare.admin_dsn)
        await grant(bare.admin_dsn, "relay_worker_login", role="worker", tenant=None)
        connection = await asyncpg.connect(bare.worker_dsn)
        assert await _wake(connection, TENANT, RELAY) != name
        connection.terminate()


async def test_a_worker_is_not_told_the_channel_of_results_and_nobody_a_foreign_one(database: TestDatabase) -> None:
    async with logins(database) as made:
        worker = await made.open("worker", TENANT, RELAY)
        every_relay = await made.open("worker", None)
        gateway = await made.open("gateway", TENANT)
        operator = await made.open("operator", TENANT)
        for connection in (worker, every_relay):
            with pytest.raises(TenancyDeniedError):
                await RelayDispatchRepository(connection, TENANT).channel("result")
        told = {
            await RelayDispatchRepository(connection, TENANT).channel("result") for connection in (gateway, operator)
        }
        assert len(told) == 1
        for connection, tenant, relay in ((worker, TENANT, "crm"), (worker, "other", RELAY), (gateway, "other", RELAY)):
            with pytest.raises(TenancyDeniedError):
                await _wake(connection, tenant, relay)
        with pytest.raises(TenancyDeniedError):
            await RelayDispatchRepository(gateway, "other").channel("result")


@pytest.mark.parametrize("arguments", [("wake", None), ("wake", ""), ("result", RELAY), ("cancel", RELAY), ("", None)])
async def test_a_channel_of_no_known_kind_is_refused(gateway: Connection, arguments: tuple[str, str | None]) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await gateway.fetchval("select relay.channel($1, $2, $3)", arguments[0], TENANT, arguments[1])
    assert refused.value.sqlstate == "S2020"


# --- ringing ------------------------------------------------------------------------------------


class _Ear:
    """Hears what is rung on some channels of the connection it listens on."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.heard: list[tuple[str, str]] = []

    async def listen(self, *channels: str) -> None:
        for channel in channels:
            await self._connection.add_listener(channel, self._hear)

    def _hear(self, connection: object, pid: int, channel: str, payload: object) -> None:
        self.heard.append((channel, str(payload)))

    async def sync(self) -> list[tuple[str, str]]:
        """Return what has been rung until now: a round trip comes after every notification before it."""
        await self._connection.fetchval("select 1")
        heard, self.heard = self.heard, []
        return heard


_RING = "select relay.ring($1, $2, $3, $4)"


async def test_a_ring_reaches_the_channel_of_its_tenant_and_relay_and_no_other(
    gateway: Connection, worker: Connection
) -> None:
    ear = _Ear(worker)
    wake = {pair: await _wake(worker, *pair) for pair in [("a", "one"), ("a", "two"), ("b", "one")]}
    await ear.listen(*wake.values())
    job = uuid4()
    await gateway.execute(_RING, ["wake"], ["a"], ["one"], [None])
    assert await ear.sync() == [(wake["a", "one"], "")]
    await gateway.execute(_RING, ["cancel"], ["b"], ["one"], [job.hex])
    assert await ear.sync() == [(wake["b", "one"], job.hex)]
    await gateway.execute(_RING, ["result"], ["a"], ["one"], [job.hex])
    assert await ear.sync() == [], "a relay does not hear of results"


async def test_equal_rings_of_one_call_are_one_notification(gateway: Connection, worker: Connection) -> None:
    ear = _Ear(gateway)
    await ear.listen(await _wake(gateway, "a", "one"), await RelayDispatchRepository(gateway, "a").channel("result"))
    jobs = [uuid4() for _ in range(5)]
    ids = ",".join(job.hex for job in jobs)
    await worker.fetchval(_RING, ["wake"] * 5 + ["result"], ["a"] * 6, ["one"] * 6, [None] * 5 + [ids])
    assert sorted(payload for _, payload in await ear.sync()) == ["", ids]


@pytest.mark.case("C08")
@pytest.mark.parametrize(
    "payload",
    [
        "",
        "hello",
        "0123456789abcdef" * 2 + ",",
        "0123456789ABCDEF" * 2,
        "0123456789abcdef" * 2 + "\n",
        "01234567-89ab-cdef-0123-456789abcdef",
        ",".join(["0123456789abcdef" * 2] * 201),
    ],
)
@pytest.mark.parametrize("kind", ["result", "cancel"])
async def test_a_payload_is_one_to_two_hundred_job_ids_and_nothing_else(
    gateway: Connection, worker: Connection, kind: str, payload: str
) -> None:
    ear = _Ear(gateway)
    await ear.listen(await _wake(gateway, "a", "one"), await RelayDispatchRepository(gateway, "a").channel("result"))
    with pytest.raises(asyncpg.PostgresError) as caught:
        await worker.execute(_RING, ["wake", kind], ["a", "a"], ["one", "one"], [None, payload])
    assert caught.value.sqlstate == "S2020"
    assert await ear.sync() == []
    most = ",".join(["0123456789abcdef" * 2] * 200)
    await worker.execute(_RING, [kind], ["a"], ["one"], [most])
    assert [payload for _, payload in await ear.sync()] == [most]


async def test_a_ring_for_a_foreign_tenant_or_relay_is_refused_whole_and_nothing_rings(database: TestDatabase) -> None:
    async with logins(database) as made:
        worker = await made.open("worker", "a", "one")
        gateway = await made.open("gateway", "a")
        every = await made.open("gateway", None)
        ear = _Ear(every)
        for tenant, relay in itertools.product("ab", ("one", "two")):
            await ear.listen(await _wake(every, tenant, relay))
        for tenant in "ab":
            await ear.listen(await RelayDispatchRepository(every, tenant).channel("result"))
        foreign: list[tuple[Connection, str, str | None]] = [
            (worker, "b", "one"),
            (worker, "a", "two"),
            (worker, "b", None),
            (gateway, "b", "one"),
        ]
        for connection, foreign_tenant, foreign_relay in foreign:
            kind = "result" if foreign_relay is None else "wake"
            ids = uuid4().hex if kind == "result" else None
            with pytest.raises(asyncpg.PostgresError) as refused:
                await connection.execute(
                    _RING, ["wake", kind], ["a", foreign_tenant], ["one", foreign_relay], [None, ids]
                )
            assert refused.value.sqlstate == "S2003"
        assert await ear.sync() == []
        await worker.execute(_RING, ["wake", "result"], ["a", "a"], ["one", None], [None, uuid4().hex])
        assert len(await ear.sync()) == 2


@pytest.mark.parametrize(
    ("kind", "relay"), [("wake", None), ("wake", ""), ("cancel", None), ("bell", RELAY), (None, RELAY), ("", RELAY)]
)
async def test_a_ring_of_no_known_kind_or_without_its_relay_is_refused(
    gateway: Connection, kind: str | None, relay: str | None
) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await gateway.execute(_RING, [kind], [TENANT], [relay], [None])
    assert refused.value.sqlstate == "S2020"


async def test_ringing_for_nothing_is_harmless(gateway: Connection) -> None:
    assert await gateway.fetchval(_RING, [], [], [], []) == 0
    assert await gateway.fetchval(_RING, None, None, None, None) == 0
