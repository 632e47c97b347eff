"""`relay-dispatch outbox`: what it prints where, what it changes, and the code it ends with."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream
from rich.console import Console

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.migrate import migrate
from dispatch_core.outbox_repository import OutboxRepository
from gateway_sdk import DispatchSink
from gateway_sdk.cli_words import parse_age, pretty_json, span
from gateway_sdk.outbox_cli import decide
from tests.support.cli import COMMAND, Ended, environment, run_cli, spawn_cli
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.outbox import KIND, make_stale, states, take, tell, write
from tests.support.protocol import OUTBOX, Connection, connected, logins


@pytest.fixture(autouse=True)
def _dsn(monkeypatch: pytest.MonkeyPatch, database: TestDatabase) -> None:
    """A person's login: an operator's, which may decide and not drain."""
    for name in ("OUTBOX_DRAIN_INTERVAL_SEC", "OUTBOX_ROUTES", "RELAY_DISPATCH_DSN", "RELAY_DISPATCH_LISTEN_DSN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OUTBOX_DSN", database.operator_dsn)


async def outbox(*arguments: str) -> Ended:
    return await run_cli("outbox", *arguments)


async def parked(gateway: Connection, *payloads: Any, error: str = "no", **where: Any) -> list[UUID]:
    """Write events, and have them given up."""
    ids = await write(gateway, *payloads, **where)
    where = {name: where[name] for name in ("kind", "tenant") if name in where}
    events = [event for event in await take(gateway, **where) if event.event_id in ids]
    assert await tell(gateway, events, "park", error=error) == [("applied", "parked")] * len(payloads)
    return ids


# --- status -----------------------------------------------------------------------------------------------------------


async def test_status_counts_by_tenant_and_kind_and_tells_of_parked_events(
    admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "claimed", "due")
    await take(gateway, 1)
    await make_stale(admin)
    await write(gateway, "x", "y", key="k", kind="invoice.sent", tenant="globex")
    await parked(gateway, "p", "q", tenant="globex")
    ended = await outbox("status")
    assert ended.code == 0
    assert ended.err.startswith("2 events parked: see them with relay-dispatch outbox list --state parked")
    rows = [line.split() for line in ended.out.splitlines()[2:5]]
    # What needs a person comes first.
    assert rows[0][:7] == ["globex", KIND, "0", "0", "0", "0", "2"]
    assert rows[1][:8] == ["acme", KIND, "1", "0", "0", "1", "(1", "stale)"]
    assert rows[2][:7] == ["globex", "invoice.sent", "1", "0", "1", "0", "0"]
    document = (await outbox("status", "--tenant", "globex", "--kind", KIND, "--json")).document
    assert [(row["tenant"], row["kind"], row["parked"], row["ready"]) for row in document] == [("globex", KIND, 2, 0)]
    assert document[0]["parked_for_seconds"] > 0
    limited = await outbox("status", "-n", "1")
    assert "… and 2 more rows" in limited.err


async def test_status_of_an_empty_outbox_is_well_and_of_what_is_not_there_is_three() -> None:
    empty = await outbox("status")
    assert (empty.code, empty.out, empty.err) == (0, "", "the outbox is empty\n")
    assert (await outbox("status", "-o", "json")).document == []
    for filters in (("--tenant", "acme"), ("--kind", KIND)):
        assert (await outbox("status", *filters)).code == 3


# --- list and show ----------------------------------------------------------------------------------------------------


async def test_list_shows_the_newest_of_all_tenants_first_and_says_how_many_more_there_are(gateway: Connection) -> None:
    ids = []
    for tenant in ("acme", "globex", "acme", "initech"):
        ids += await write(gateway, tenant, tenant=tenant)
    everything = await outbox("list", "--json")
    assert (everything.code, everything.err) == (0, "")
    assert [row["event_id"] for row in everything.document] == [str(event_id) for event_id in ids[::-1]]
    page = await outbox("list", "-n", "1")
    assert str(ids[3]) in page.out
    assert page.err == f"… and 3 more: --before {ids[3]}\n"
    page = await outbox("list", "-n", "2", "--before", str(ids[3]), "-o", "json")
    assert [row["event_id"] for row in page.document] == [str(ids[2]), str(ids[1])]
    assert page.err == f"… and 1 more: --before {ids[1]}\n"
    last = await outbox("list", "-n", "2", "--before", str(ids[1]))
    assert (str(ids[0]) in last.out, last.err) == (True, "")


async def test_list_shows_what_was_asked_for(admin: Connection, gateway: Connection) -> None:
    await write(gateway, "plain")
    await write(gateway, "first", "second", key="order-7")
    await parked(gateway, "new", kind="invoice.sent")
    await parked(gateway, "old", kind="invoice.sent")
    await admin.execute(f"update {OUTBOX} set parked_at = parked_at - interval '8 days' where payload = '\"old\"'")

    async def listed(*filters: str) -> list[str]:
        ended = await outbox("list", *filters, "--json")
        assert ended.code == (0 if ended.document else 3)
        return [json.loads(row["payload"]) for row in ended.document]

    assert await listed("--key", "order-7") == ["second", "first"]
    assert await listed("--state", "waiting", "--kind", KIND) == ["second"]
    assert await listed("--state", "parked") == ["old", "new"]
    assert await listed("--state", "parked", "--older-than", "7d") == ["old"]
    assert await listed("--older-than", "1w") == ["old"]
    assert await listed("--tenant", "globex") == []


async def test_list_cuts_payloads_and_errors_and_a_terminal_obeys_nothing_that_others_have_written(
    admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "x" * 300, "y" * 70_000)
    (event_id,) = await parked(gateway, "\x9b2J \u202e", error="\x1b[31mred\nnext " + "e" * 300, kind="evil\x1b]0;")
    ended = await outbox("list")
    assert re.search('"x{10,78}…', ended.out)
    assert "x" * 80 not in ended.out
    assert "(70,002 bytes)" in ended.out
    assert "e" * 100 not in ended.out
    shown = await outbox("show", str(event_id))
    documents = await outbox("list", "--json"), await outbox("show", str(event_id), "--json")
    for text in (ended.out, shown.out, documents[0].out, documents[1].out):
        assert not set("\x1b\x9b\u202e") & set(text)
    assert r"\x1b[31mred\nnext" in shown.out
    # And is the same value.
    assert documents[1].document["payload"] == "\x9b2J \u202e"
    assert documents[1].document["last_error"].startswith("\x1b[31mred\nnext")


@pytest.mark.parametrize("width", [80, 120, 200])
async def test_in_a_list_no_id_is_cut_however_narrow_the_terminal(
    gateway: Connection, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    def console() -> Console:
        return Console(file=sys.stdout, width=width)

    for module in ("dispatch_core.cli.common", "gateway_sdk.outbox_cli.text"):
        monkeypatch.setattr(f"{module}.result_console", console)
    ids = [*await write(gateway, "x" * 300, tenant="globex", key="k"), *await parked(gateway, 1, error="e" * 300)]
    ended = await outbox("list")
    assert all(str(event_id) in ended.out for event_id in ids)
    assert max(map(len, ended.out.splitlines())) <= width
    assert "eee" in ended.out
    assert ("written" in ended.out) is (width == 200)


async def test_show_prints_all_of_an_event_its_payload_with_every_digit(gateway: Connection) -> None:
    payload = {"order": 7, "lines": [], "total": 10**25, "text": 'a "quoted", {braced}: text'}
    (event_id,) = await parked(gateway, payload, key="order-7")
    async with gateway.transaction():
        exact = await gateway.fetchval(
            "select relay.outbox_enqueue('k', '{\"price\": 1.10, \"huge\": 1e400}', p_tenant => 'acme')"
        )
    ended = await outbox("show", str(event_id))
    assert (ended.code, ended.err) == (0, "")
    for line in ("tenant +acme", "key +order-7", "state +parked", "attempts +1", "last error +no"):
        assert re.search(line, ended.out), line
    assert '"text": "a \\"quoted\\", {braced}: text"' in ended.out
    assert (await outbox("show", str(event_id), "--json")).document["payload"] == payload
    assert json.loads((await outbox("show", str(event_id), "--payload")).out) == payload
    for option in ((), ("--payload",), ("-o", "json")):
        assert '"price": 1.10' in (await outbox("show", str(exact), *option)).out


def test_json_is_indented_and_nothing_else_about_it_is_changed() -> None:
    text = '{"a": [], "b": {}, "c": [1.10, {"d": "x,:{}[]\\"\\\\"}], "e": -1e400, "f": null}'
    pretty = pretty_json(text)
    assert "".join(pretty.split("\n")).replace("  ", "").replace(",", ", ") == text.replace("x,", "x, ")
    assert json.loads(pretty) == json.loads(text)
    assert pretty_json("7") == "7"
    assert pretty_json('["a"]') == '[\n  "a"\n]'


async def test_what_is_not_there_is_exit_code_three(gateway: Connection) -> None:
    await write(gateway, "due")
    for arguments in (
        ("list", "--state", "parked"),
        ("show", str(uuid4())),
        ("retry", str(uuid4())),
        ("retry", "--kind", KIND),
        ("retry", "--all", "--yes"),
        ("park", str(uuid4()), "--reason", "why"),
        ("purge", "--older-than", "0s", "--yes"),
    ):
        ended = await outbox(*arguments)
        assert (ended.code, ended.out) == (3, ""), arguments
        assert ended.err, arguments


# --- retry and park ---------------------------------------------------------------------------------------------------


async def test_retry_says_of_each_event_what_was_done_and_takes_no_more_than_it_was_given(
    admin: Connection, gateway: Connection
) -> None:
    (first,) = await parked(gateway, "first", tenant="globex")
    (other,) = await parked(gateway, "other")
    (due,) = await write(gateway, "due")
    unknown = uuid4()
    ended = await outbox("retry", str(first), str(due), str(unknown), str(first))
    assert ended.code == 0
    assert ended.err.splitlines() == [
        f"{first}: retried",
        f"{due}: left as it is, ready",
        f"{unknown}: not there, or of a tenant that this login may not see",
    ]
    assert (await states(admin, "globex"), await states(admin)) == (
        {"first": "ready"}, {"other": "parked", "due": "ready"}
    )  # fmt: skip
    again = await outbox("retry", str(first), "--json")
    assert (again.code, again.document) == (
        3, [{"event_id": str(first), "tenant": "globex", "was": "ready", "retried": False}]
    )  # fmt: skip
    elsewhere = await outbox("retry", str(other), "--tenant", "globex")
    assert elsewhere.code == 3


async def test_retry_by_kind_key_and_age_takes_those_alone_and_all_asks_first(
    admin: Connection, gateway: Connection
) -> None:
    for tenant in ("acme", "globex"):
        await parked(gateway, "a", "b", kind="order.placed", tenant=tenant)
        await parked(gateway, "c", kind="invoice.sent", tenant=tenant)
    await parked(gateway, "keyed", key="k")
    await admin.execute(f"update {OUTBOX} set parked_at = parked_at - interval '1 day' where payload = '\"a\"'")
    refused = await outbox("retry", "--all")
    assert (refused.code, "--yes" in refused.err) == (2, True)
    assert set((await states(admin)).values()) == {"parked"}
    aged = await outbox("retry", "--kind", "order.placed", "--older-than", "12h", "--tenant", "acme")
    assert (aged.code, aged.err) == (0, "1 event retried\n")
    assert (await states(admin))["a"] == "ready"
    assert (await outbox("retry", "--key", "k", "--json")).document == {
        "retried": 1, "matched": 1, "tenants": {"acme": 1}
    }  # fmt: skip
    kind = await outbox("retry", "--kind", "order.placed")
    assert kind.err == "3 events retried\n"
    everything = await outbox("retry", "--all", "--yes", "-o", "json")
    assert everything.document == {"retried": 2, "matched": 2, "tenants": {"acme": 1, "globex": 1}}


async def test_park_gives_events_up_with_a_reason_and_says_where_one_may_be_on_its_way(
    admin: Connection, gateway: Connection
) -> None:
    claimed, ready = await write(gateway, "claimed", "ready")
    (event,) = await take(gateway, 1)
    ended = await outbox("park", str(claimed), str(ready), "--reason", "order 7 was cancelled")
    assert ended.code == 0
    assert ended.err.splitlines() == [
        f"{claimed}: parked; it was claimed and may be delivered yet",
        f"{ready}: parked",
    ]
    assert await tell(gateway, [event]) == [("stale", "parked")]
    assert "order 7 was cancelled" in (await outbox("show", str(ready))).out
    assert (await outbox("park", str(ready), "--reason", "again")).code == 3


async def test_an_id_that_two_tenants_have_must_be_told_apart(admin: Connection, gateway: Connection) -> None:
    event_id = uuid4()
    for tenant in ("acme", "globex"):
        await gateway.execute(
            "select relay.outbox_enqueue('k', '1', p_tenant => $1, p_event_id => $2)", tenant, event_id
        )
    for arguments in (("show",), ("retry",), ("park", "--reason", "why")):
        ended = await outbox(*arguments, str(event_id))
        assert (ended.code, ended.out) == (2, "")
        assert f"both acme and globex have an event {event_id}: name one by --tenant" in ended.err
    assert (await outbox("park", str(event_id), "--reason", "why", "--tenant", "globex")).code == 0
    assert set((await states(admin)).values()) == {"ready"}


# --- purge ------------------------------------------------------------------------------------------------------------


async def test_purge_takes_parked_events_alone_and_not_without_a_yes(admin: Connection, gateway: Connection) -> None:
    await write(gateway, "ready", "claimed", "later", delay=None)
    await take(gateway, 1)
    await parked(gateway, "old", "kept", kind="order.placed")
    await admin.execute(
        f"update {OUTBOX} set parked_at = parked_at - interval '8 days', created_at = created_at - interval '9 days'"
        " where payload = '\"old\"'"
    )
    refused = await outbox("purge", "--older-than", "7d")
    assert (refused.code, refused.out) == (2, "")
    assert "without a terminal nobody can be asked: give --yes" in refused.err
    assert len(await states(admin)) == 5
    assert (await outbox("purge", "--older-than", "7d", "--yes", "--kind", KIND)).code == 3
    assert (await outbox("purge", "--older-than", "7d", "--yes", "--tenant", "globex")).code == 3
    done = await outbox("purge", "--older-than", "7d", "--yes")
    assert (done.code, done.out, done.err) == (0, "", "1 event purged\n")
    assert (await outbox("purge", "--older-than", "0s", "-y", "--json")).document == {
        "purged": 1, "matched": 1, "tenants": {"acme": 1}
    }  # fmt: skip
    assert set(await states(admin)) == {"ready", "claimed", "later"}


async def test_an_age_needs_a_unit_and_purge_says_what_it_takes_it_for(admin: Connection, gateway: Connection) -> None:
    await parked(gateway, "a")
    await admin.execute(f"update {OUTBOX} set parked_at = parked_at - interval '1 minute'")
    refused = await outbox("purge", "--older-than", "30", "--yes")
    assert refused.code == 2
    assert "30 has no unit; 30d?" in refused.err
    assert await states(admin) == {"a": "parked"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(("30d", "30 days"), ("2w", "14 days"), ("1d", "1 day"), ("36h", "36 hours"), ("15m", "15 minutes")),
        *(("1s", "1 second"), ("90s", "90 seconds"), ("0.5s", "0.5 seconds"), ("0d", "0 seconds")),
    ],
)
def test_an_age_is_said_exactly(given: str, said: str) -> None:
    assert span(parse_age(given)) == said


async def test_purge_goes_in_bounded_batches_and_counts_what_it_removed_while_others_decide_too(
    database: TestDatabase, admin: Connection, gateway: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "BATCH", 2)
    batches: list[int] = []
    purge = OutboxRepository.purge

    async def purge_beside_others(verbs: Any, tenant: str, *arguments: Any, **options: Any) -> int:
        count = await purge(verbs, tenant, *arguments, **options)
        batches.append(count)
        if len(batches) == 1:  # Of what was not decided about yet another person retries one, and one more is parked.
            async with connected(database.admin_dsn) as other:
                await other.execute(
                    f"update {OUTBOX} set state = 'ready', parked_at = null where payload = '4'; "
                    f"update {OUTBOX} set state = 'parked', parked_at = clock_timestamp() where payload = '99'"
                )
        return count

    monkeypatch.setattr(OutboxRepository, "purge", purge_beside_others)
    await parked(gateway, *range(6))
    await write(gateway, 99)
    async with connected(database.admin_dsn) as other, other.transaction():
        await other.execute(f"select from {OUTBOX} where payload = '5' for update")
        ended = await outbox("purge", "--older-than", "0s", "--yes")
    assert batches == [2, 2, 0]
    assert ended.err == "4 events purged of 6; the others are no longer parked, or in somebody else's hands\n"
    assert await states(admin) == {"4": "ready", "5": "parked", "99": "parked"}


def at_a_terminal(database: TestDatabase, *arguments: str, answer: str) -> tuple[int, str, str]:
    """Run a command whose stdin and stderr are a terminal; return its code, stdout, and what the terminal showed."""
    theirs, ours = pty.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, "outbox", *arguments],
            env=environment(OUTBOX_DSN=database.operator_dsn, TERM="xterm"),
            stdin=ours,
            stdout=subprocess.PIPE,
            stderr=ours,
        ) as process:
            os.close(ours)
            shown = b""
            while True:
                try:
                    piece = os.read(theirs, 4096)
                except OSError:  # the other end is closed
                    break
                if not piece:
                    break
                shown += piece
                if b"[y/N]" in shown and answer:
                    os.write(theirs, answer.encode())
                    answer = ""
            assert process.stdout is not None
            return process.wait(30), process.stdout.read().decode(), shown.decode()
    finally:
        os.close(theirs)


async def test_at_a_terminal_purge_asks_and_shows_how_far_it_is(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await parked(gateway, "x", "y")
    await admin.execute(f"update {OUTBOX} set parked_at = parked_at - interval '31 days'")
    ask = ("purge", "--older-than", "30d")
    code, out, shown = await anyio.to_thread.run_sync(lambda: at_a_terminal(database, *ask, answer="n\n"))
    assert (code, out) == (1, "")
    assert "Remove 2 parked events of tenant acme, parked for more than 30 days, for good? [y/N]" in shown
    assert "nothing was changed" in shown
    assert len(await states(admin)) == 2
    code, out, shown = await anyio.to_thread.run_sync(lambda: at_a_terminal(database, *ask, answer="y\n"))
    assert (code, out) == (0, "")
    assert "purging" in shown
    assert "2/2" in shown
    assert "2 events purged" in shown
    assert await states(admin) == {}


# --- who may, and with what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--older-than", "soon"),
        ("list", "--older-than", "30"),
        ("list", "--state", "lost"),
        ("list", "--limit", "0"),
        ("list", "--tenant", ""),
        ("show", "not-an-id"),
        ("retry",),
        ("retry", "--older-than", "1d"),
        ("retry", str(uuid4()), "--kind", "k"),
        ("retry", str(uuid4()), "--all"),
        ("park", str(uuid4())),
        ("park", str(uuid4()), "--reason", " "),
        ("purge", "--yes"),
        ("purge", "--yes", "--older-than", "-1d"),
        ("drain", "--route", "k=erp/Post;ttl=60"),
        ("drain",),
        ("drain", "--route", "order.placed"),
        ("drain", "--route", "order.placed=erp"),
        ("drain", "--route", "order.placed=erp/Post;retries=3"),
        ("drain", "--route", "order.placed=erp/Post;ttl=soon"),
        ("drain", "--route", "k=erp/Post", "--route", "k=erp/Put"),
        ("drain", "--app", "no_such_module:drainer"),
        ("drain", "--app", "myapp:drainer", "--dsn", "postgresql:///x"),
    ],
)
async def test_bad_input_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    ended = await outbox(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err


async def test_an_operator_of_one_tenant_sees_and_changes_that_one_alone(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    (foreign,) = await parked(gateway, "acme")
    await parked(gateway, "globex", tenant="globex")
    async with logins(database) as made:
        name = await made.create()
        await made.bind(name, "operator", "globex")
        dsn = ("--dsn", database.dsn(name))
        assert {row["tenant"] for row in (await outbox("list", *dsn, "--json")).document} == {"globex"}
        assert (await outbox("show", str(foreign), *dsn)).code == 3
        assert (await outbox("park", str(foreign), "--reason", "why", *dsn)).code == 3
        refused = await outbox("list", "--tenant", "acme", *dsn)
        assert (refused.code, "S2R-TENANCY-DENIED" in refused.err) == (1, True)
        assert (await outbox("purge", "--older-than", "0s", "--yes", *dsn)).err == "1 event purged\n"
    assert await states(admin) == {"acme": "parked"}


async def test_a_worker_may_nothing_here_and_an_operator_does_not_drain(database: TestDatabase) -> None:
    for arguments in (("status", "--dsn", database.worker_dsn), ("drain", "--route", "k=erp/Post")):
        ended = await outbox(*arguments)
        assert (ended.code, ended.out) == (1, ""), ended.err
        assert "S2R-TENANCY-DENIED" in ended.err
    assert "needs a grant as gateway; operators do not drain" in ended.err


async def test_without_a_dsn_both_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOX_DSN")
    ended = await outbox("status")
    assert (ended.code, "give --dsn or set OUTBOX_DSN or RELAY_DISPATCH_DSN" in ended.err) == (2, True)


async def test_a_database_without_the_room_is_exit_code_four(bare_database: TestDatabase) -> None:
    for room in (None, "dispatch"):
        if room is not None:
            await migrate(bare_database.admin_dsn, only=[room])
        for arguments in (("status",), ("purge", "--older-than", "0s", "--yes"), ("drain", "--route", "k=erp/Post")):
            ended = await outbox(*arguments, "--dsn", bare_database.admin_dsn)
            assert (ended.code, ended.out) == (4, "")
            assert "relay-dispatch db migrate --only outbox\n" in ended.err
    assert "room outbox" in ended.err


async def test_a_drain_that_is_not_told_where_the_jobs_go_says_how_to_tell_it(bare_database: TestDatabase) -> None:
    await migrate(bare_database.admin_dsn, only=["outbox"])
    ended = await outbox("drain", "--route", "k=erp/Post", "--dsn", bare_database.admin_dsn)
    assert (ended.code, ended.out) == (4, "")
    assert "give --dispatch-dsn or RELAY_DISPATCH_DSN" in ended.err


async def test_a_database_that_does_not_answer_is_exit_code_five_without_password_or_traceback() -> None:
    env = {"OUTBOX_DSN": "postgresql://somebody:s3cret@127.0.0.1:1/nowhere"}
    for arguments in (("list",), ("drain", "--route", "k=erp/Post")):
        ended = await spawn_cli("outbox", *arguments, env=env)
        assert (ended.code, ended.out) == (5, "")
        assert "Traceback" not in ended.err
        assert "s3cret" not in ended.err


async def test_every_command_explains_itself() -> None:
    group = await outbox("--help")
    for name in ("status", "list", "show", "drain", "retry", "park", "purge"):
        assert name in group.out
        ended = await outbox(name, "--help")
        assert ended.code == 0
        assert "Exit code" in ended.out
        assert f"relay-dispatch outbox {name}" in ended.out


# --- drain ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _drains(monkeypatch: pytest.MonkeyPatch, database: TestDatabase) -> None:
    monkeypatch.setenv("OUTBOX_DSN", database.gateway_dsn)


APP = """
from dispatch_core import OutboxPark
from gateway_sdk import OutboxDrainer

drainer = OutboxDrainer()

@drainer.sink("works")
async def works(event):
    pass

@drainer.sink("fails")
async def fails(event):
    raise ConnectionError("nobody there")

@drainer.sink("parks")
async def parks(event):
    raise OutboxPark("not for us")
"""


@pytest.fixture
def app(tmp_path: Path) -> tuple[str, ...]:
    """A module of a name that no other test has used, since Python keeps what it has imported."""
    name = f"drainer_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(APP)
    return ("drain", "--app", f"{name}:drainer", "--app-dir", str(tmp_path))


@pytest.mark.usefixtures("_drains")
async def test_drain_makes_jobs_by_routes_and_leaves_other_kinds_alone(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    ids = await write(gateway, {"order": 7}, {"order": 8}, kind="order.placed")
    await write(gateway, "x", kind="invoice.sent")
    await write(gateway, "y", kind="order.placed", tenant="globex")
    ended = await outbox(
        "drain", "--route", "order.placed=erp/PostOrder;ttl=1h;max_attempts=3", "--tenant", "acme", "--json"
    )
    assert ended.code == 0, ended.err
    assert {name: count for name, count in ended.document.items() if count} == {
        "claimed": 2, "delivered": 2, "left_kinds": ["invoice.sent"]
    }  # fmt: skip
    assert "left alone, since they have no route: events of kind invoice.sent" in ended.err
    jobs = (await RelayDispatchRepository(worker, "acme").claim("erp", claimed_by="test", limit=10)).jobs
    assert {job.job_id: job.json() for job in jobs} == {
        DispatchSink.job_id(ids[0], "order.placed"): {"order": 7},
        DispatchSink.job_id(ids[1], "order.placed"): {"order": 8},
    }
    assert {(job.operation, job.max_attempts) for job in jobs} == {("PostOrder", 3)}
    assert 3500 < jobs[0].remaining() <= 3600
    assert (await states(admin), await states(admin, "globex")) == ({"x": "ready"}, {"y": "ready"})


@pytest.mark.usefixtures("_drains")
async def test_drain_takes_its_routes_from_the_environment_too_and_starts_no_drainer_beside_itself(
    gateway: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_ROUTES", '{"order.placed": {"relay": "erp", "operation": "PostOrder"}}')
    monkeypatch.setenv("OUTBOX_DRAIN_INTERVAL_SEC", "0.01")
    nothing = await outbox("drain")
    assert (nothing.code, nothing.out, nothing.err) == (0, "", "nothing was due\n")
    await write(gateway, *range(250), kind="order.placed")
    ended = await outbox("drain")
    assert (ended.code, ended.err) == (0, "")
    assert re.findall(r"\d+", ended.out) == ["250", "250", "0", "0", "0", "0", "0", "0"]


@pytest.mark.usefixtures("_drains")
async def test_drain_by_a_drainer_of_the_users_own_counts_honestly_and_ends_with_one_where_something_failed(
    admin: Connection, gateway: Connection, app: tuple[str, ...]
) -> None:
    await write(gateway, "w", kind="works")
    target = (*app, "--json")
    well = await outbox(*target)
    assert (well.code, well.document["delivered"]) == (0, 1)
    await write(gateway, "p", kind="parks")
    await write(gateway, "other", kind="other")
    parks = await outbox(*target)
    # (It is the same object, in this process; a command of its own counts from nothing.)
    assert (parks.code, parks.document["parked"], parks.document["delivered"]) == (1, 1, 1)
    assert "1 event parked: relay-dispatch outbox list --state parked" in parks.err
    await write(gateway, "f", kind="fails")
    await admin.execute(f"update {OUTBOX} set attempts = 20 where payload = '\"f\"'")
    fails = await outbox(*target)
    assert (fails.code, fails.document["failed"]) == (1, 1)
    assert "1 delivery failed, to be tried again after a pause" in fails.err
    assert await states(admin) == {"p": "parked", "other": "ready", "f": "ready"}
    assert (await outbox("drain", "--app", f"{app[2].split(':')[0]}:works", *app[3:])).code == 2


WEBHOOKS = """
import httpx, httpx2
from gateway_sdk import OutboxDrainer, WebhookSink

drainer = OutboxDrainer()
for library in (httpx, httpx2):
    def answer(_, library=library):
        return library.Response(500, stream=library.ByteStream(b""))

    client = library.AsyncClient(transport=library.MockTransport(answer))
    url = "https://example.com/path-s3cret?token=query-s3cret"
    drainer.add_sink(library.__name__, WebhookSink(url, secret="whsec_" + "QUFB" * 8, client=client))
"""


async def test_drain_that_tells_why_tells_no_url_of_a_webhook(
    database: TestDatabase, gateway: Connection, tmp_path: Path
) -> None:
    (tmp_path / "webhooks_drainer.py").write_text(WEBHOOKS)
    for kind in ("httpx", "httpx2"):
        await write(gateway, "x", kind=kind)
    target = ("--app", "webhooks_drainer:drainer", "--app-dir", str(tmp_path))
    ended = await spawn_cli("outbox", "drain", *target, "-v", env={"OUTBOX_DSN": database.gateway_dsn})
    assert ended.code == 1
    # Each at least once: with jitter, the pause before the next attempt may be over while the drain still goes on.
    for kind in ("httpx", "httpx2"):
        assert f"of kind {kind} was not delivered: WebhookFailedError: example.com answered 500" in ended.err
    assert "failed, to be tried again after a pause\n" in ended.err  # and not that -v would tell why
    assert "s3cret" not in ended.err


@pytest.mark.usefixtures("_drains")
async def test_drain_gives_a_drainer_without_sinks_the_routes_of_the_environment(
    database: TestDatabase, admin: Connection, gateway: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_DSN", database.gateway_dsn)
    (tmp_path / "bare_drainer.py").write_text("from gateway_sdk import OutboxDrainer\ndrainer = OutboxDrainer()\n")
    target = ("drain", "--app", "bare_drainer:drainer", "--app-dir", str(tmp_path), "--json")
    without = await outbox(*target)
    assert (without.code, without.out) == (2, "")
    monkeypatch.setenv("OUTBOX_ROUTES", '{"order.placed": {"relay": "erp", "operation": "PostOrder"}}')
    (tmp_path / "routed_drainer.py").write_text("from gateway_sdk import OutboxDrainer\ndrainer = OutboxDrainer()\n")
    await write(gateway, "x", kind="order.placed")
    await write(gateway, "y", kind="unrouted")
    ended = await outbox("drain", "--app", "routed_drainer:drainer", *target[3:])
    # As in a gateway: what has no route is parked with that reason.
    assert (ended.code, ended.document["delivered"], ended.document["parked"]) == (1, 1, 1)
    assert await states(admin) == {"y": "parked"}


async def test_drain_with_watch_goes_on_until_it_is_told_to_stop(
    database: TestDatabase, admin: Connection, gateway: Connection, app: tuple[str, ...]
) -> None:
    target = ["outbox", *app, "--watch", "--json"]
    env = environment(OUTBOX_DSN=database.gateway_dsn)
    await write(gateway, "before", kind="works")
    async with running(*target, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        with anyio.fail_after(30):
            await eventually(lambda: _gone(admin))
            await write(gateway, "after", kind="works")
            # One that does not ring, and one that does.
            await gateway.execute("select relay.outbox_enqueue('works', '1', p_tenant => 'acme')")
            await eventually(lambda: _gone(admin))
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            out = "".join([text async for text in TextReceiveStream(process.stdout)])
            said = "".join([text async for text in TextReceiveStream(process.stderr)])
    assert json.loads(out)["delivered"] == 3
    assert "Traceback" not in said


@asynccontextmanager
async def running(*arguments: str, env: dict[str, str]) -> AsyncIterator[Process]:
    """Start a command that goes on; whatever the block does, it is over behind it."""
    process = await anyio.open_process([*COMMAND, *arguments], env=env)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def _gone(admin: Connection) -> bool:
    return await admin.fetchval(f"select count(*) = 0 from {OUTBOX}")


@pytest.mark.case("C30")
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
async def test_a_drain_that_is_stopped_gives_back_what_it_has_claimed(
    database: TestDatabase, admin: Connection, gateway: Connection, tmp_path: Path, by: signal.Signals
) -> None:
    (tmp_path / "slow_drainer.py").write_text(
        "import anyio\nfrom gateway_sdk import OutboxDrainer\ndrainer = OutboxDrainer()\n"
        "@drainer.sink('slow')\nasync def slow(event):\n    print('begun', flush=True)\n    await anyio.sleep(60)\n"
    )
    await write(gateway, "x", kind="slow")
    target = ["outbox", "drain", "--app", "slow_drainer:drainer", "--app-dir", str(tmp_path)]
    env = environment(OUTBOX_DSN=database.gateway_dsn)
    async with running(*target, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        with anyio.fail_after(30):
            assert b"begun" in await process.stdout.receive()
            process.send_signal(by)
            assert await process.wait() == 128 + by
            said = "".join([text async for text in TextReceiveStream(process.stderr)])
    assert "stopped" in said
    assert "Traceback" not in said
    assert await states(admin) == {"x": "ready"}
    assert await admin.fetchval(f"select attempts from {OUTBOX}") == 0


@pytest.mark.usefixtures("_drains")
async def test_the_last_attempt_of_a_drain_parks_with_the_reason_that_show_tells(
    admin: Connection, gateway: Connection, app: tuple[str, ...]
) -> None:
    (event_id,) = await write(gateway, "f", kind="fails")
    await admin.execute(f"update {OUTBOX} set attempts = 24")
    ended = await outbox(*app)
    assert ended.code == 1
    shown = await outbox("show", str(event_id), "--json")
    assert (shown.document["state"], shown.document["attempts"]) == ("parked", 25)
    assert shown.document["last_error"] == "ConnectionError: nobody there"
