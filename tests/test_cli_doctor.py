"""`relay-dispatch doctor` finds what is wrong, says how to mend it, and is content where nothing is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import asyncpg
import pytest

from dispatch_core.cli.checks import examine, server
from dispatch_core.cli.checks.finding import Finding
from dispatch_core.migrate import grant, migrate
from dispatch_core.outbox import Outbox
from tests.support.cli import Ended, run_cli, spawn_cli
from tests.support.databases import TestDatabase
from tests.support.outbox import Recorder, make_stale, take, tell, write
from tests.support.pooler import FakePooler
from tests.support.protocol import OUTBOX

Connection: TypeAlias = "asyncpg.Connection[Any]"

# The test server is not durable, which the doctor rightly finds.
NOT_DURABLE = {"fsync", "full_page_writes"}


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {f.check: f.verdict for f in findings if not (f.check == "settings" and f.values.keys() & NOT_DURABLE)}


def of(findings: list[Finding], check: str) -> Finding:
    return next(finding for finding in findings if finding.check == check)


@pytest.fixture(autouse=True)
def _no_dsn_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RELAY_DISPATCH_DSN", "RELAY_DISPATCH_LISTEN_DSN", "OUTBOX_DSN", "OUTBOX_LISTEN_DSN"):
        monkeypatch.delenv(name, raising=False)


@asynccontextmanager
async def role(admin: Connection, database: TestDatabase, options: str = "") -> AsyncIterator[str]:
    name = f"doctor_{database.name}"
    await admin.execute(f"create role {name} login password 'relay' {options}")
    try:
        yield name
    finally:
        await admin.execute(f"drop owned by {name}; drop role {name}")


@pytest.mark.parametrize("kind", ["gateway", "worker", "operator"])
async def test_doctor_finds_nothing_wrong_with_a_plain_login(database: TestDatabase, kind: str) -> None:
    findings = await examine(getattr(database, f"{kind}_dsn"))
    assert set(verdicts(findings).values()) == {"pass"}
    assert list(verdicts(findings)) == [
        "reach", "version", "pooler", "statements", "listen", "clock", "schema", "row security", "rights", "outbox",
        "durable jobs", "listeners", "transactions",
    ]  # fmt: skip
    assert of(findings, "rights").found.startswith(f"{kind} for every tenant")
    assert 0 < float(str(of(findings, "listen").values["round_trip_ms"])) < 1000
    assert abs(float(str(of(findings, "clock").values["skew_ms"]))) < 1000


@pytest.mark.parametrize("room", ["dispatch", "outbox", "durable"])
async def test_doctor_asks_for_no_more_than_the_rooms_that_are_installed(
    bare_database: TestDatabase, room: str
) -> None:
    await migrate(bare_database.admin_dsn, only=[room])
    await grant(bare_database.admin_dsn, "relay_gateway_login", role="gateway", tenant="acme")
    findings = await examine(bare_database.gateway_dsn)
    assert set(verdicts(findings).values()) == {"pass"}
    assert of(findings, "schema").values["rooms"] == [room]
    assert f"rooms: {room} (not installed: " in of(findings, "schema").found


@pytest.mark.case("C41")
async def test_doctor_finds_a_login_that_row_security_does_not_bind(database: TestDatabase) -> None:
    findings = await examine(database.admin_dsn)
    assert verdicts(findings)["row security"] == "fail"
    assert "superuser" in of(findings, "row security").found
    # And nobody bound it to a tenant.
    assert verdicts(findings)["rights"] == "fail"


async def test_doctor_finds_a_table_without_forced_row_security(database: TestDatabase, admin: Connection) -> None:
    await admin.execute("alter table relay.s2r_relay_dispatch_queue no force row level security")
    finding = of(await examine(database.worker_dsn), "row security")
    assert (finding.verdict, finding.values["open_tables"]) == ("fail", ["s2r_relay_dispatch_queue"])


async def test_doctor_finds_a_tenant_that_is_bound_to_the_login_itself(
    database: TestDatabase, admin: Connection
) -> None:
    async with role(admin, database) as name:
        await admin.execute(f"grant relay_operator to {name}; alter role {name} set app.tenant_id = 'acme'")
        await admin.execute("select relay.grant_binding($1, 'operator', null, null)", name)
        assert verdicts(await examine(database.dsn(name)))["row security"] == "warn"


async def test_doctor_finds_a_login_without_rights_and_one_without_a_binding(
    database: TestDatabase, admin: Connection
) -> None:
    async with role(admin, database) as name:
        stranger = await examine(database.dsn(name))
        assert of(stranger, "schema").verdict == "fail"
        assert "db grant" in str(of(stranger, "schema").mend)
        await admin.execute(f"grant relay_worker to {name}")
        unbound = of(await examine(database.dsn(name)), "rights")
        assert (unbound.verdict, unbound.found) == ("fail", "no binding: every call is answered S2R-TENANCY-DENIED")
        await admin.execute("select relay.grant_binding($1, 'worker', 'acme', 'erp')", name)
        bound = of(await examine(database.dsn(name)), "rights")
        assert (bound.verdict, bound.found) == ("pass", "worker for tenant acme, relay erp")


async def test_doctor_finds_a_verb_that_the_login_may_not_call(database: TestDatabase, admin: Connection) -> None:
    await admin.execute("revoke execute on function relay.mark_expired(text, uuid[]) from relay_gateway")
    finding = of(await examine(database.gateway_dsn), "rights")
    assert (finding.verdict, finding.found) == ("fail", "as gateway, it may not call mark_expired")


async def test_doctor_finds_a_missing_schema_and_leaves_out_what_rests_on_it(bare_database: TestDatabase) -> None:
    findings = await examine(bare_database.admin_dsn)
    assert of(findings, "schema").verdict == "fail"
    assert of(findings, "schema").mend == "relay-dispatch db migrate"
    assert not {"row security", "rights", "outbox", "durable jobs"} & verdicts(findings).keys()


@pytest.mark.case("C05")
async def test_doctor_finds_a_pooler_and_that_prepared_statements_and_listen_do_not_pass_it(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C05: behind a transaction pooler LISTEN is accepted and nothing is heard."""
    monkeypatch.setattr("dispatch_core.cli.checks.way.LISTEN_TIMEOUT_SECONDS", 0.3)
    async with FakePooler.before(database.gateway_dsn, mode="swap") as pooler:
        through = await examine(pooler.dsn(database.gateway_dsn))
        assert verdicts(through)["pooler"] == "warn"
        assert verdicts(through)["listen"] == "fail"
        assert verdicts(through)["statements"] == "fail"
        assert "STATEMENT_CACHE_SIZE=0" in str(of(through, "statements").mend)
        assert "LISTEN_DSN" in str(of(through, "listen").mend)
        # What can be read behind it is read all the same.
        assert verdicts(through)["schema"] == verdicts(through)["rights"] == "pass"
        beside = await examine(pooler.dsn(database.gateway_dsn), database.gateway_dsn)
        assert verdicts(beside)["pooler"] == verdicts(beside)["listen"] == "pass"


@pytest.mark.case("C14")
async def test_doctor_finds_an_old_transaction(
    database: TestDatabase, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "OLD_TRANSACTION_SECONDS", 0.0)
    transaction = admin.transaction()
    await transaction.start()
    try:
        finding = of(await examine(database.admin_dsn), "transactions")
    finally:
        await transaction.rollback()
    assert finding.verdict == "warn"
    # On a server that is not ours, others may have been at work for longer.
    pid = admin.get_server_pid() if database.server.is_ours else ""
    assert f"pg_terminate_backend({pid}" in str(finding.mend)


async def test_doctor_finds_many_listeners_and_settings_that_hurt(
    database: TestDatabase, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MANY_LISTENERS", 1)
    heard: list[asyncio.Event] = []
    connections = [await asyncpg.connect(database.gateway_dsn) for _ in range(2)]
    try:
        for connection in connections:
            heard.append(asyncio.Event())
            await connection.add_listener("somewhere", lambda *_: None)
        async with role(admin, database) as name:
            await admin.execute(f"alter role {name} set synchronous_commit = off")
            await admin.execute(f"alter role {name} set default_transaction_isolation = 'serializable'")
            await admin.execute(f"grant pg_monitor, relay_gateway to {name}")
            findings = await examine(database.dsn(name))
    finally:
        for connection in connections:
            connection.terminate()
    assert of(findings, "listeners").verdict == "warn"
    found = {key for finding in findings if finding.check == "settings" for key in finding.values}
    assert {"synchronous_commit", "default_transaction_isolation"} <= found


# --- the outbox -----------------------------------------------------------------------------------------------------


async def test_doctor_finds_parked_events_of_every_tenant_and_says_which_kinds(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    assert "nothing parked, no stale claim; nothing is due" in of(await examine(database.operator_dsn), "outbox").found
    for tenant in ("acme", "globex"):
        for kind in ("order.placed", "invoice.sent"):
            await write(gateway, "x", kind=kind, tenant=tenant)
            await tell(gateway, await take(gateway, kind=kind, tenant=tenant), "park", error="no")
    await admin.execute(f"update {OUTBOX} set parked_at = parked_at - interval '3 hours' where tenant_id = 'globex'")
    for dsn in (database.operator_dsn, database.gateway_dsn):
        finding = of(await examine(dsn), "outbox")
        assert finding.verdict == "warn"
        assert finding.found == "4 events are parked (invoice.sent, order.placed), the oldest for 3.0 h"
        assert "outbox list --state parked" in str(finding.mend)
        assert finding.values["parked"] == 4
    ended = await doctor(database.operator_dsn)
    assert (ended.code, "4 events are parked" in ended.out) == (0, True)


async def test_doctor_finds_claims_that_nobody_answers_for(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    await write(gateway, "x", "y")
    await take(gateway)
    assert of(await examine(database.gateway_dsn), "outbox").verdict == "pass"
    await make_stale(admin)
    finding = of(await examine(database.gateway_dsn), "outbox")
    assert (finding.verdict, finding.values["stale_claims"]) == ("warn", 2)
    assert finding.found.startswith("2 claims are older than 300 s, the oldest 5 min")


async def test_doctor_finds_a_backlog_and_whether_anybody_drains(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    await write(gateway, "x", kind="order.placed")
    fresh = of(await examine(database.gateway_dsn), "outbox")
    assert fresh.verdict == "pass"
    assert "the oldest event that is due has been so for 0." in fresh.found
    await admin.execute(f"update {OUTBOX} set available_at = available_at - interval '10 minutes'")
    alone = of(await examine(database.gateway_dsn), "outbox")
    assert (alone.verdict, alone.values["drainers_seen"]) == ("warn", 0)
    assert alone.found.startswith("events have been due for 10 min (order.placed), and nobody seems to drain")
    assert "OUTBOX_DRAIN_INTERVAL_SEC" in str(alone.mend)
    # A drainer that has no sink for that kind.
    async with Outbox(database.gateway_dsn, sinks={"another": Recorder()}):
        finding = of(await examine(database.gateway_dsn), "outbox")
    assert (finding.verdict, finding.found.endswith("although somebody drains")) == ("warn", True)
    assert "a sink for these kinds" in str(finding.mend)


async def test_doctor_says_plainly_where_there_is_no_outbox_or_no_right_to_see_it(
    database: TestDatabase, bare_database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    await write(gateway, "x")
    worker = of(await examine(database.worker_dsn), "outbox")
    assert (worker.verdict, worker.found[:14]) == ("pass", "not looked at:")
    async with role(admin, database) as name:
        await admin.execute(f"grant relay_operator to {name}")
        unbound = of(await examine(database.dsn(name)), "outbox")
        assert unbound.verdict == "pass"
        await admin.execute("select relay.grant_binding($1, 'operator', 'globex', null)", name)
        foreign = of(await examine(database.dsn(name)), "outbox")
        # Of the event of acme it learns nothing.
        assert (foreign.verdict, foreign.values["due_seconds"]) == ("pass", None)
    await migrate(bare_database.admin_dsn, only=["dispatch"])
    await grant(bare_database.admin_dsn, "relay_gateway_login", role="gateway", tenant="acme")
    absent = of(await examine(bare_database.gateway_dsn), "outbox")
    assert (absent.verdict, "not installed here" in absent.found) == ("pass", True)
    assert "db migrate --only outbox" in absent.found


# --- the command ----------------------------------------------------------------------------------------------------


async def doctor(dsn: str, *arguments: str) -> Ended:
    return await run_cli("doctor", "--dsn", dsn, *arguments)


async def test_doctor_looks_at_the_outbox_where_outbox_dsn_says_it_is(
    database: TestDatabase, bare_database: TestDatabase, gateway: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    (event_id,) = await write(gateway, "x")
    (event,) = await take(gateway)
    assert event.event_id == event_id
    await tell(gateway, [event], "park")
    monkeypatch.setenv("OUTBOX_DSN", database.gateway_dsn)
    await migrate(bare_database.admin_dsn, only=["dispatch"])
    await grant(bare_database.admin_dsn, "relay_gateway_login", role="gateway", tenant="acme")
    found = (await doctor(bare_database.gateway_dsn, "-o", "json")).document["findings"]
    named = {finding["check"]: finding["verdict"] for finding in found}
    assert [named[f"OUTBOX_DSN {check}"] for check in ("schema", "row security", "rights")] == ["pass"] * 3
    assert named["OUTBOX_DSN outbox"] == "warn"
    assert "outbox" not in named  # it is not missed where it is not to be
    alone = await run_cli("doctor", "-o", "json")
    assert {finding["check"]: finding["verdict"] for finding in alone.document["findings"]}["outbox"] == "warn"
    assert "OUTBOX_DSN" not in alone.out
    for dsn, said in (
        (bare_database.gateway_dsn, "relay-dispatch db migrate --only outbox"),
        ("postgresql://u:s3cret@127.0.0.1:9/x", "the check could not be made"),
    ):
        monkeypatch.setenv("OUTBOX_DSN", dsn)
        wrong = await doctor(database.gateway_dsn)
        assert wrong.code == 1
        assert said in wrong.out
        assert "s3cret" not in wrong.out
    monkeypatch.delenv("OUTBOX_DSN")
    assert "RELAY_DISPATCH_DSN, or OUTBOX_DSN" in (await run_cli("doctor")).err


async def test_doctor_ends_with_zero_where_nothing_failed_and_with_one_where_something_did(
    database: TestDatabase,
) -> None:
    well = await doctor(database.gateway_dsn, "--output", "json")
    assert (well.code, well.err) == (0, "")
    assert well.document["ok"] is True
    ill = await doctor(database.admin_dsn)
    assert ill.code == 1
    assert "row security" in ill.out
    assert "→ use a plain login" in ill.out


async def test_doctor_as_a_process_ends_with_five_where_nothing_answers_and_shows_no_password() -> None:
    ended = await spawn_cli("doctor", "--dsn", "postgresql://somebody:s3cret@127.0.0.1:1/nowhere", "-o", "json")
    assert ended.code == 5
    assert [f["check"] for f in ended.document["findings"]] == ["reach"]
    assert "s3cret" not in ended.out + ended.err
    assert "Traceback" not in ended.err


async def test_doctor_needs_a_dsn(database: TestDatabase) -> None:
    ended = await run_cli("doctor")
    assert (ended.code, ended.out) == (2, "")
    assert "RELAY_DISPATCH_DSN" in ended.err


async def test_a_wrong_password_is_a_failure_and_is_not_shown(database: TestDatabase) -> None:
    ended = await doctor(database.dsn("relay_gateway_login", "s3cret"))
    assert (ended.code, ended.err) == (1, "")
    assert "the server refuses this login: password authentication failed" in ended.out
    assert "→ give the login's password, percent-encoded" in ended.out
    assert "s3cret" not in ended.out
