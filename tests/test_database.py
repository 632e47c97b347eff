"""The database seam: every driver error becomes one of ours, and nothing waits without a bound."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, TypeAlias
from uuid import UUID

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from dispatch_core.database import (
    Database,
    close_connection,
    connect,
    in_transaction,
    mapped_errors,
    takes_no_writes,
    translate,
)
from dispatch_core.dev.wire import Wire
from dispatch_core.errors import (
    ConfigurationError,
    ConnectionLostError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    IdempotencyConflictError,
    InvalidDeadlineError,
    InvalidInputError,
    RelayDispatchError,
    SchemaMismatchError,
    TenancyDeniedError,
    TenancyMismatchError,
    TenancyUnboundError,
    UnknownJobError,
    WaitTimeoutError,
)
from dispatch_core.pacing import pace_of
from dispatch_core.tenancy import bypasses_row_security, warn_if_bypassing
from tests.support.activity import terminate, wait_until_statement_runs
from tests.support.databases import TestDatabase
from tests.support.ended import end_unseen
from tests.support.eventually import HANGS, eventually
from tests.support.pooler import FakePooler
from tests.support.proxy import TcpProxy

JOB = UUID(int=7)
Admin: TypeAlias = "asyncpg.Connection[Any]"


async def raised_by_the_server(conn: Admin, sqlstate: str, message: str = "the reason") -> RelayDispatchError:
    with pytest.raises(RelayDispatchError) as caught, mapped_errors(job_id=JOB):
        await conn.execute(
            f"do $$ begin raise exception '{message}' using errcode = '{sqlstate}', detail = 'foreign row'; end $$"
        )
    assert isinstance(caught.value.__cause__, asyncpg.PostgresError)
    assert "foreign row" not in str(caught.value)
    return caught.value


# --- errors ---


@pytest.mark.parametrize(
    ("sqlstate", "kind", "retryable"),
    [
        ("S2001", TenancyUnboundError, False),
        ("S2002", TenancyMismatchError, False),
        ("S2003", TenancyDeniedError, False),
        ("S2010", IdempotencyConflictError, False),
        ("S2020", InvalidInputError, False),
        ("S2021", InvalidDeadlineError, False),
        ("S2030", UnknownJobError, False),
        ("S2040", SchemaMismatchError, False),
        ("S2999", DatabaseError, False),
        ("40001", DatabaseBusyError, True),
        ("40P01", DatabaseBusyError, True),
        ("55P03", DatabaseBusyError, True),
        ("57014", DatabaseBusyError, True),
        ("40003", ConnectionLostError, True),
        ("08006", ConnectionLostError, True),
        ("57P01", ConnectionLostError, True),
        ("57P02", ConnectionLostError, True),
        ("25006", ConnectionLostError, True),
        ("25P03", ConnectionLostError, True),
        ("57P03", DatabaseUnavailableError, True),
        ("53300", DatabaseUnavailableError, True),
        ("53100", DatabaseUnavailableError, True),
        ("42501", TenancyDeniedError, False),
        ("22012", DatabaseError, False),
        ("23505", DatabaseError, False),
        ("42883", DatabaseError, False),
        ("XX000", DatabaseError, False),
    ],
)
async def test_each_sqlstate_becomes_its_error(
    admin: Admin, sqlstate: str, kind: type[RelayDispatchError], retryable: bool
) -> None:
    error = await raised_by_the_server(admin, sqlstate)
    assert type(error) is kind
    assert error.retryable is retryable
    assert "the reason" in str(error)
    if isinstance(error, DatabaseError):
        assert (error.sqlstate, error.job_id) == (sqlstate, JOB)
    if isinstance(error, UnknownJobError):
        assert error.job_id == JOB


@pytest.mark.parametrize(
    "statement", ["select relay.enqueue()", "select * from relay.jobs", "select * from relay.x(1)"]
)
async def test_a_database_without_our_schema_is_a_schema_mismatch_with_its_mend(
    bare_database: TestDatabase, statement: str
) -> None:
    async with Database(bare_database.admin_dsn) as database:
        with pytest.raises(SchemaMismatchError, match="relay-dispatch db migrate"):
            await database.execute(statement)
        with pytest.raises(DatabaseError) as caught:  # somebody else's schema is none of ours
            await database.execute(statement.replace("relay.", "other."))
        assert type(caught.value) is DatabaseError


async def test_an_argument_that_cannot_be_encoded_is_invalid_input(admin: Admin) -> None:
    for argument in ("\ud800", 5, object()):
        with pytest.raises(InvalidInputError), mapped_errors():
            await admin.fetchval("select $1::text", argument)
    with pytest.raises(DatabaseError) as caught, mapped_errors():
        await admin.fetchval("select $1::text", "a\0b")
    assert caught.value.sqlstate == "22021"


async def test_a_closed_connection_and_one_that_is_busy_are_told_apart(admin: Admin) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(admin.execute, "select pg_sleep(0.2)")
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(DatabaseError) as caught, mapped_errors():
            await admin.fetch("select 1")
    assert not isinstance(caught.value, DatabaseUnavailableError)
    await admin.close()
    with pytest.raises(DatabaseUnavailableError), mapped_errors():
        await admin.fetch("select 1")


async def test_a_connection_that_was_cut_is_told_by_an_error_of_ours_whatever_is_asked_of_it(
    database: TestDatabase,
) -> None:
    """The driver has no object left then to ask, and stumbles over that (D168); others who stumble so are not taken
    for it."""
    conn = await connect(database.gateway_dsn)
    conn.terminate()
    for ask in (in_transaction, takes_no_writes):
        with pytest.raises(DatabaseUnavailableError, match="cut"):
            ask(conn)
    for name in ("fetch", "is_in_transaction"):
        with pytest.raises(AttributeError), mapped_errors():
            getattr(None, name)()


def test_our_own_errors_and_everybody_elses_pass_untouched() -> None:
    for error in (WaitTimeoutError(), TenancyUnboundError(), KeyError("x"), ZeroDivisionError()):
        assert translate(error) is None
        with pytest.raises(type(error)) as caught, mapped_errors():
            raise error
        assert caught.value is error


@pytest.mark.case("C29")
async def test_cancellation_passes_untouched(admin: Admin) -> None:
    with anyio.move_on_after(0.05) as scope, mapped_errors():
        await admin.execute("select pg_sleep(10)")
    assert scope.cancelled_caught


# --- connecting ---


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://ann:s3cr/et@db/app",
        "postgresql://ann:s3cr#et@db/app",
        "postgresql://ann:s3cret@db:port/app",
        "mysql://ann:s3cret@db/app",
        "ann:s3cret@db",
        "postgresql://ann:s3cret@" + "x" * 100 + "/app",
        "postgresql://ann:s3cret@db/app?sslmode=maybe",
    ],
)
async def test_a_dsn_that_is_none_is_a_configuration_error_that_shows_nothing_of_it(dsn: str) -> None:
    for opening in (connect(dsn), Database(dsn).__aenter__()):
        with pytest.raises(ConfigurationError) as caught:
            await opening
        assert "s3cr" not in str(caught.value)
        assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("dsn", "cause"),
    [
        ("postgresql://ann:s3cret@db/app?sslmode=maybe", "sslmode in the DSN must be one of disable, "),
        ("postgresql://ann:s3cret@db:port/app", "the port in the DSN must be a number below 65536"),
        ("postgresql://ann:s3cret@127.0.0.1:99999/app", "the port in the DSN must be a number below 65536"),
        ("postgresql://ann:s3cr/et@db/app", "percent-encoded"),
    ],
)
async def test_an_unusable_dsn_is_told_by_its_cause(dsn: str, cause: str) -> None:
    for opening in (connect(dsn), Database(dsn).__aenter__()):
        with pytest.raises(ConfigurationError, match=cause) as caught:
            await opening
        assert ("percent" in str(caught.value)) is ("percent" in cause)


async def test_who_waited_for_the_try_of_another_hears_of_an_unusable_dsn_as_the_other_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dsn = "postgresql://ann:s3cr/et@db/app"
    monkeypatch.setattr("dispatch_core.pacing.full_jitter", lambda *_: 0.05)
    pace = pace_of(dsn)
    pace.suspect()  # so that they try one at a time
    told = await asyncio.gather(*(connect(dsn) for _ in range(8)), return_exceptions=True)
    assert pace.tries < 8
    assert [type(error) for error in told] == [ConfigurationError] * 8
    assert len(set(map(str, told))) == 1
    assert len(set(map(id, told))) == 8


@pytest.mark.parametrize("dsn", ["postgresql://ann:1@23@db.invalid/app", "postgresql://ann.invalid:12/3@db/app"])
async def test_a_host_that_may_be_a_piece_of_a_password_is_not_named(dsn: str) -> None:
    for opening in (connect(dsn), Database(dsn).__aenter__()):
        with pytest.raises(DatabaseUnavailableError, match="percent-encoded") as caught:
            await opening
        assert "could not be reached: " in str(caught.value)
        assert "invalid" not in str(caught.value)


async def test_a_server_that_refuses_is_unavailable(unused_tcp_port: int) -> None:
    dsn = f"postgresql://ann:s3cret@127.0.0.1:{unused_tcp_port}/app"
    for opening in (connect(dsn), Database(dsn).__aenter__()):
        with pytest.raises(DatabaseUnavailableError) as caught:
            await opening
        assert not isinstance(caught.value, ConnectionLostError)
        assert caught.value.retryable
        assert f"could not be reached at 127.0.0.1:{unused_tcp_port}: " in str(caught.value)
        assert "s3cret" not in str(caught.value)


async def test_a_wrong_password_is_a_clear_error_without_the_password(database: TestDatabase) -> None:
    dsn = database.dsn("relay_gateway_login", "s3cret")
    for opening in (connect(dsn), Database(dsn).__aenter__()):
        with pytest.raises(DatabaseError, match="password authentication failed") as caught:
            await opening
        assert caught.value.sqlstate == "28P01"
        assert not caught.value.retryable
        assert "s3cret" not in str(caught.value)


async def test_a_database_that_does_not_exist_is_named(database: TestDatabase) -> None:
    with pytest.raises(DatabaseError, match="nowhere") as caught:
        await connect(database.server.gateway_dsn("nowhere"))
    assert caught.value.sqlstate == "3D000"


async def test_a_server_that_never_answers_is_given_up_in_time(database: TestDatabase) -> None:
    async with TcpProxy.before(database.gateway_dsn) as proxy:
        proxy.mode = "black_hole"
        for opening in (
            connect(proxy.dsn(database.gateway_dsn), connect_timeout=0.3),
            Database(proxy.dsn(database.gateway_dsn), connect_timeout=0.3).__aenter__(),
        ):
            start = time.monotonic()
            with pytest.raises(DatabaseUnavailableError, match="in time"):
                await opening
            assert time.monotonic() - start < 2


async def test_connections_carry_their_application_name(database: TestDatabase, admin: Admin) -> None:
    async with Database(database.gateway_dsn, application_name="relay-dispatch test") as pool:
        dedicated = await pool.connect_dedicated("heartbeat")
        names = await admin.fetch(
            "select application_name from pg_stat_activity where datname = current_database() and usename like 'relay%'"
        )
        assert {row[0] for row in names} == {"relay-dispatch test", "relay-dispatch test heartbeat"}
        await close_connection(dedicated)
        await close_connection(dedicated)
        assert dedicated.is_closed()


# --- the pool ---


async def test_a_pool_that_is_not_open_says_so(database: TestDatabase) -> None:
    pool = Database(database.gateway_dsn)
    with pytest.raises(DatabaseUnavailableError, match="not open"):
        await pool.execute("select 1")
    async with pool:
        with pytest.raises(ConfigurationError, match="open already"):
            await pool.__aenter__()
    with pytest.raises(DatabaseUnavailableError, match="not open"):
        await pool.execute("select 1")


async def test_a_pool_larger_at_least_than_at_most_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"min_size \(5\)"):
        Database("postgresql://x/y", min_size=5, max_size=4)


async def test_an_exhausted_pool_is_a_retryable_error_in_time(database: TestDatabase) -> None:
    async with Database(database.gateway_dsn, max_size=1, connect_timeout=0.2) as pool, pool.connection():
        with pytest.raises(DatabaseUnavailableError) as caught:
            await pool.execute("select 1")
        assert caught.value.retryable


async def test_of_a_callers_time_a_quarter_is_left_when_no_connection_was_free(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever got one in his last moment would be cut off, and take it along from all who wait behind him (D165)."""
    waits: list[float] = []
    move_on_after = anyio.move_on_after

    def noted(seconds: float, **options: Any) -> anyio.CancelScope:
        waits.append(seconds)
        return move_on_after(seconds, **options)

    async with Database(database.gateway_dsn, max_size=1, connect_timeout=60.0) as pool, pool.connection():
        monkeypatch.setattr(anyio, "move_on_after", noted)
        with pytest.raises(DatabaseUnavailableError):
            async with pool.connection(within=0.2):
                pass
    assert waits[0] == pytest.approx(0.15)


@pytest.mark.case("C40")
async def test_a_pooled_connection_goes_back_without_a_statement_and_without_an_open_transaction(
    database: TestDatabase, admin: Admin
) -> None:
    async with Database(database.gateway_dsn, min_size=1, max_size=1) as pool:
        for statement in ("select 'mark'", "begin"):
            async with pool.connection() as conn:
                pid = conn.get_server_pid()
                await conn.execute(statement)
            state, query = await admin.fetchrow("select state, query from pg_stat_activity where pid = $1", pid)  # type: ignore[misc]
            assert state == "idle"
            assert query == ("select 'mark'" if statement != "begin" else "ROLLBACK")


async def test_a_killed_connection_is_replaced(database: TestDatabase, admin: Admin) -> None:
    async with Database(database.gateway_dsn, min_size=1, max_size=2) as pool:
        ((pid,),) = await pool.execute("select pg_backend_pid()")
        async with anyio.create_task_group() as group:
            group.start_soon(terminate, admin, pid)
            with pytest.raises(ConnectionLostError):
                await pool.execute("select pg_sleep(30)")
        ((other,),) = await pool.execute("select pg_backend_pid()")
        assert other != pid


async def test_a_session_that_was_ended_while_its_socket_stays_open_is_sent_nothing_and_replaced(
    database: TestDatabase, admin: Admin
) -> None:
    dsn = database.gateway_dsn
    async with TcpProxy.before(dsn) as proxy, Database(proxy.dsn(dsn), min_size=1, max_size=1) as pool:
        ((pid,),) = await pool.execute("select pg_backend_pid()")
        assert await end_unseen(admin, proxy) == 1
        with pytest.raises(DatabaseUnavailableError) as caught:
            await pool.execute("select 1")
        assert not isinstance(caught.value, ConnectionLostError)
        assert isinstance(caught.value.__cause__, asyncpg.InternalClientError)
        ((other,),) = await pool.execute("select pg_backend_pid()")
        assert other != pid


@pytest.mark.parametrize("fails", [False, True], ids=["block-ends", "block-fails"])
async def test_a_transaction_left_open_on_a_session_that_was_ended_gives_its_place_back(
    database: TestDatabase, admin: Admin, fails: bool
) -> None:
    """Its rollback fails in the driver with an error that is none of PostgreSQL's, and none of its interface."""
    dsn = database.gateway_dsn
    async with TcpProxy.before(dsn) as proxy, Database(proxy.dsn(dsn), min_size=1, max_size=1) as pool:
        for _ in range(3):
            with pytest.raises(KeyError) if fails else contextlib.nullcontext():
                async with pool.connection() as conn:
                    await conn.execute("begin")
                    assert await end_unseen(admin, proxy) == 1
                    if fails:
                        raise KeyError
            assert await pool.execute("select 1") == [(1,)]


async def test_one_broken_connection_retires_the_others_of_its_age(database: TestDatabase) -> None:
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        Database(proxy.dsn(database.gateway_dsn), min_size=3, max_size=3, command_timeout=0.3) as pool,
    ):
        for connection in proxy.connections:
            connection.mode = "black_hole"
        with pytest.raises(ConnectionLostError, match="in time"):
            await pool.execute("select 1")
        for _ in range(3):
            async with pool.connection() as conn:
                assert await conn.fetchval("select 1", timeout=HANGS) == 1


async def test_a_statement_on_a_dead_line_ends_in_time_and_so_does_the_pool(database: TestDatabase) -> None:
    async with TcpProxy.before(database.gateway_dsn) as proxy:
        start = time.monotonic()
        async with Database(proxy.dsn(database.gateway_dsn), min_size=2, command_timeout=0.3) as pool:
            proxy.mode = "black_hole"
            with pytest.raises(ConnectionLostError):
                await pool.execute("select 1")
        # One statement, one release, one closing of the pool: each has its bound.
        assert time.monotonic() - start < 7


@pytest.mark.case("C29")
async def test_a_cancelled_statement_is_cancelled_on_the_server_and_its_connection_serves_on(
    database: TestDatabase, admin: Admin
) -> None:
    async with Database(database.gateway_dsn, min_size=1, max_size=1) as pool:
        pid: int = 0

        async def long() -> None:
            nonlocal pid
            async with pool.connection() as conn:
                pid = conn.get_server_pid()
                await conn.execute("select pg_sleep(60)")

        async with anyio.create_task_group() as group:
            group.start_soon(long)
            await wait_until_statement_runs(admin, "pg_sleep(60)")
            group.cancel_scope.cancel()
        state = await admin.fetchval("select state from pg_stat_activity where pid = $1", pid)
        assert state == "idle"
        ((same,),) = await pool.execute("select pg_backend_pid()")
        assert same == pid


@pytest.mark.case("C29")
async def test_a_connection_that_cannot_be_rolled_back_is_cut_and_its_place_is_free_again(
    database: TestDatabase,
) -> None:
    """Left in the driver's pool as lent, it would make the pool smaller by one for ever."""
    async with Database(database.gateway_dsn, min_size=0, max_size=1) as pool:
        async with pool.connection() as conn:
            await conn.execute("begin")
            under_way = asyncio.create_task(conn.execute("select pg_sleep(600)"))
            await asyncio.sleep(0)
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
            await under_way
        async with pool.connection(HANGS) as conn:
            assert await conn.fetchval("select 1") == 1


@pytest.mark.case("C29")
@pytest.mark.parametrize("statement", ["select pg_sleep(60)", None], ids=["in a statement", "between two"])
async def test_a_cancelled_transaction_is_rolled_back_and_nothing_is_logged(
    database: TestDatabase, caplog: pytest.LogCaptureFixture, statement: str | None
) -> None:
    async with Database(database.gateway_dsn, min_size=1, max_size=1) as pooled:
        with anyio.CancelScope() as scope:
            async with pooled.connection() as conn, conn.transaction():
                pid = await conn.fetchval("select pg_backend_pid()")
                scope.deadline = anyio.current_time() + 0.05
                await (conn.execute(statement) if statement else anyio.sleep_forever())
        async with pooled.connection() as conn:
            assert not conn.is_in_transaction()
            assert await conn.fetchval("select pg_backend_pid()") == pid
    assert caplog.text == ""


@pytest.mark.case("C29")
async def test_a_second_cancellation_in_the_rollback_of_the_first_costs_no_place(database: TestDatabase) -> None:
    """It is asyncio's own, which no shield of anyio's holds off, and so comes wherever something is waited for."""
    async with (
        Wire.to(database.gateway_dsn) as wire,
        Database(wire.dsn(database.gateway_dsn), min_size=1, max_size=1) as pooled,
    ):
        rollback = wire.hold("ROLLBACK", "call")
        begun = asyncio.Event()

        async def use() -> None:
            async with pooled.connection() as conn:
                await conn.execute("begin")
                begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(use())
        await begun.wait()
        task.cancel()
        await rollback.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with pooled.connection(HANGS) as conn:
            assert await conn.fetchval("select 1") == 1


async def test_cancelling_a_statement_on_a_dead_line_takes_no_longer_than_its_bound(database: TestDatabase) -> None:
    async with TcpProxy.before(database.gateway_dsn) as proxy:
        pool = Database(proxy.dsn(database.gateway_dsn), min_size=1, max_size=1)
        async with pool:
            start = time.monotonic()
            with anyio.move_on_after(0.2) as scope:
                async with pool.connection() as conn:
                    proxy.mode = "black_hole"
                    await conn.fetch("select 1")
            assert scope.cancelled_caught
            assert time.monotonic() - start < 4


async def test_closing_the_pool_leaves_no_backend_behind(database: TestDatabase, admin: Admin) -> None:
    async with Database(database.gateway_dsn, min_size=3, application_name="leaver"):
        assert await admin.fetchval("select count(*) from pg_stat_activity where application_name = 'leaver'") == 3

    async def gone() -> bool:
        return not await admin.fetchval("select count(*) from pg_stat_activity where application_name = 'leaver'")

    await eventually(gone)


async def test_a_callers_pool_is_used_and_left_open(database: TestDatabase) -> None:
    async with asyncpg.create_pool(database.gateway_dsn, min_size=1, max_size=1) as theirs:
        async with Database.wrap(theirs) as pool:
            assert (await pool.execute("select 1"))[0][0] == 1
            with pytest.raises(ConfigurationError, match="DSN"):
                await pool.connect_dedicated()
            await close_connection(await pool.connect_dedicated(dsn=database.gateway_dsn))
        assert await theirs.fetchval("select 1") == 1


async def test_a_server_that_restarts_is_used_again_as_soon_as_it_is_back(durable_database: TestDatabase) -> None:
    server = durable_database.server
    async with Database(durable_database.gateway_dsn, min_size=2) as pool:
        await anyio.to_thread.run_sync(server.stop)
        with pytest.raises(DatabaseUnavailableError) as caught:
            await pool.execute("select 1")
        assert caught.value.retryable
        await anyio.to_thread.run_sync(server.start)
        assert (await pool.execute("select 1"))[0][0] == 1


@pytest.mark.case("C05")
async def test_behind_a_transaction_pooler_the_pool_works_without_a_statement_cache(database: TestDatabase) -> None:
    async with FakePooler.before(database.gateway_dsn, mode="swap") as pooler:
        dsn = pooler.dsn(database.gateway_dsn)
        async with Database(dsn, statement_cache_size=0, max_size=2) as pool:
            for n in range(10):
                assert (await pool.execute("select $1::int", n))[0][0] == n
        async with Database(dsn, max_size=1) as pool:

            async def several() -> None:
                for _ in range(3):
                    await pool.execute("select 1")

            with pytest.raises(DatabaseError, match="STATEMENT_CACHE_SIZE=0"):
                await several()


# --- whether row security binds ---


async def test_plain_logins_are_bound_by_row_security(gateway: Admin, worker: Admin, operator: Admin) -> None:
    for conn in (gateway, worker, operator):
        assert await bypasses_row_security(conn) is None


@pytest.mark.case("C41")
async def test_a_login_that_bypasses_row_security_is_told_why(
    admin: Admin, database: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    assert await warn_if_bypassing(admin, logging.getLogger("test")) == "it is a superuser"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    name = f"bypass_{database.name[-8:]}"
    await admin.execute(f"create role {name} login password 'relay'")
    try:
        for change, reason in (
            (f"alter role {name} bypassrls", "BYPASSRLS"),
            (f"alter role {name} nobypassrls; grant relay_owner to {name}", "member of relay_owner"),
            (f"revoke relay_owner from {name}; grant relay_api to {name}", "member of relay_api"),
            (f"revoke relay_api from {name}; grant relay_sweep to {name}", "member of relay_sweep"),
            (f"revoke relay_sweep from {name}; grant pg_write_all_data to {name}", "member of pg_write_all_data"),
            (f"revoke pg_write_all_data from {name}; grant pg_read_server_files to {name}", "files of the tables"),
            (f"revoke pg_read_server_files from {name}; alter role {name} replication", "REPLICATION"),
            (f"alter role {name} noreplication; grant insert on relay.role_binding to {name}", "relay.role_binding"),
            (f"revoke all on relay.role_binding from {name}; alter role {name} superuser", "superuser"),
            # It is a plain role from its first statement on, and a superuser whenever it likes.
            (f"alter role {name} set role = relay_gateway", "superuser"),
        ):
            await admin.execute(change)
            conn = await connect(database.dsn(name))
            assert reason in str(await bypasses_row_security(conn))
            await close_connection(conn)
        await admin.execute(f"alter role {name} nosuperuser; alter role {name} reset role")
        conn = await connect(database.dsn(name))
        assert await bypasses_row_security(conn) is None
        await close_connection(conn)
    finally:
        await admin.execute(f"drop owned by {name}; drop role {name}")


# --- connections that are kept ---


async def test_connections_stay_out_of_the_drivers_pool_between_their_uses(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[None] = []
    acquire = asyncpg.pool.Pool.acquire

    def count(self: Any, **options: Any) -> Any:
        taken.append(None)
        return acquire(self, **options)

    monkeypatch.setattr(asyncpg.pool.Pool, "acquire", count)
    async with Database(database.gateway_dsn, min_size=1, max_size=2) as pool:
        for _ in range(5):
            await pool.execute("select 1")
    assert len(taken) == 1


async def test_whoever_waits_for_a_connection_is_served_in_turn_and_a_cancelled_one_takes_none_along(
    database: TestDatabase,
) -> None:
    async with Database(database.gateway_dsn, max_size=1) as pool:
        served: list[int] = []

        async def use(number: int) -> None:
            async with pool.connection():
                served.append(number)
                await anyio.lowlevel.checkpoint()

        for _ in range(3):
            async with anyio.create_task_group() as group, pool.connection():
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as waiters:
                        for number in range(3):
                            waiters.start_soon(use, number)
                        await anyio.wait_all_tasks_blocked()
                        scope.cancel()
                for number in (3, 4, 5):
                    group.start_soon(use, number)
                await anyio.wait_all_tasks_blocked()
            assert served[-3:] == [3, 4, 5]
        assert pool._pool._places == 1
        assert (await pool.execute("select 1"))[0][0] == 1
    assert pool._pool._places == 0
