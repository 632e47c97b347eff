"""`relay-dispatch durable`: what it prints where, what it really does, and the code it ends with."""

from __future__ import annotations

import getpass
import json
import os
import pty
import re
import signal
import subprocess
import sys
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest

from dispatch_core.durable_repository import DurableRepository
from dispatch_core.migrate import migrate
from gateway_sdk.durable_cli import timeline
from tests.support import durable as sql
from tests.support.cli import COMMAND, Ended, environment, run_cli, spawn_cli
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.protocol import Connection, logins

JOB_ID = str(uuid4())


@pytest.fixture(autouse=True)
def _dsn(monkeypatch: pytest.MonkeyPatch, database: TestDatabase) -> None:
    """A person's login: an operator's, which may look and decide."""
    for name in ("RELAY_DISPATCH_LISTEN_DSN", "OUTBOX_DSN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RELAY_DISPATCH_DSN", database.operator_dsn)


async def durable(*arguments: object) -> Ended:
    return await run_cli("durable", *map(str, arguments))


def lines(ended: Ended) -> list[Any]:
    """Return stdout as the documents that its lines are."""
    return [json.loads(line) for line in ended.out.splitlines()]


async def reviewed(gateway: Connection, worker: Connection, admin: Connection, chunks: int = 1, **job: Any) -> UUID:
    """Submit a job whose chunks may not run twice, and lose who held them."""
    job_id = await sql.submit(gateway, chunks, idempotent=False, **job)
    for lease in await sql.claim(worker, chunks, tenants=[job.get("tenant", "acme")]):
        await sql.checkpoint(worker, lease, {"sent": 7}, tenant=job.get("tenant", "acme"))
    await sql.run_out(admin)
    await sql.reap(worker, tenant=job.get("tenant", "acme"))
    await sql.finish(worker, job_id, tenant=job.get("tenant", "acme"))
    return job_id


async def failed(gateway: Connection, worker: Connection, chunks: int = 2) -> UUID:
    """Submit a job of which one chunk fails, and the others are done."""
    job_id = await sql.submit(gateway, chunks, rows=10)
    first, *others = await sql.claim(worker, chunks)
    await sql.fail(worker, first, "no such table: people", retryable=False)
    for lease in others:
        await sql.complete(worker, lease, rows_done=10)
    await sql.finish(worker, job_id)
    return job_id


# --- list and show ----------------------------------------------------------------------------------------------------


async def test_list_shows_the_newest_of_all_tenants_first_and_how_far_each_is(
    gateway: Connection, worker: Connection
) -> None:
    ids = [UUID(int=n) for n in range(1, 5)]
    for job_id, tenant in zip(ids, ("acme", "globex", "acme", "initech"), strict=True):
        await sql.submit(gateway, 4, tenant=tenant, job_id=job_id, rows=10)
    (lease,) = await sql.claim(worker, tenants=["globex"])
    await sql.complete(worker, lease, tenant="globex", rows_done=8, rows_failed=2)
    everything = await durable("list", "--json")
    assert (everything.code, everything.err) == (0, "")
    assert [row["job_id"] for row in everything.document] == [str(job_id) for job_id in ids[::-1]]
    # Counted now, although nobody has counted since.
    assert [row["fraction"] for row in everything.document] == [0, 0, 0.25, 0]
    page = await durable("list", "-n", 2)
    assert page.err == f"there are more: --before {ids[2]}\n"
    assert [line.split()[0] for line in page.out.splitlines()[2:4]] == [str(ids[3]), str(ids[2])]
    rest = await durable("list", "-n", 2, "--before", ids[2])
    assert rest.err == ""
    row = rest.out.splitlines()[2].split()
    assert row[:6] == [str(ids[1]), "globex", "import", "running", "25.0%", "2"]
    assert "1 done, 3 pending" in rest.out


async def test_list_shows_what_was_asked_for(gateway: Connection, worker: Connection, admin: Connection) -> None:
    paused, mail = await sql.submit(gateway), await sql.submit(gateway, kind="mail")
    await sql.control(gateway, paused, "pause")
    waiting = await reviewed(gateway, worker, admin, tenant="globex")

    async def listed(*filters: str) -> set[str]:
        ended = await durable("list", *filters, "--json")
        assert ended.code == (0 if ended.document else 3)
        return {row["job_id"] for row in ended.document}

    assert await listed("--status", "paused", "--status", "needs_review") == {str(paused), str(waiting)}
    assert await listed("--kind", "mail") == {str(mail)}
    assert await listed("--tenant", "globex") == {str(waiting)}
    assert await listed("--tenant", "globex", "--kind", "mail") == set()


async def test_show_tells_how_far_a_job_is_and_which_chunks_want_to_be_looked_at(
    gateway: Connection, worker: Connection
) -> None:
    job_id = await failed(gateway, worker, 3)
    ended = await durable("show", job_id)
    assert (ended.code, ended.err) == (0, "")
    for line in ("status +completed_with_errors", "rows +20 of 30 rows", "chunks +3: 1 failed, 2 done", "by +alice"):
        assert re.search(line, ended.out), line
    (row,) = [line.split() for line in ended.out.splitlines() if "no such table" in line]
    assert row[:4] == ["1", "failed", "1", "0/10"]
    document = (await durable("show", job_id, "--json")).document
    assert (document["chunk_counts"]["done"], [c["seq"] for c in document["chunks"]]) == (2, [1])
    done = (await durable("show", job_id, "--status", "done", "-n", 1)).err
    assert done.startswith("there are more of done")
    behind = (await durable("show", job_id, "--status", "done", "--after", 2, "--json")).document
    assert [chunk["seq"] for chunk in behind["chunks"]] == [3]


async def test_show_of_a_chunk_is_the_evidence_and_keeps_its_token(
    gateway: Connection, worker: Connection, admin: Connection
) -> None:
    job_id = await reviewed(gateway, worker, admin, 2)
    ended = await durable("show", job_id, "--chunk", 2)
    assert (ended.code, ended.err) == (0, "")
    for line in ("status +needs_review", "attempts +1", "last held by +relay:1", r'checkpoint \{\n  "sent": 7'):
        assert re.search(line, ended.out), line
    (chunk,) = (await durable("show", job_id, "-c", 2, "--json")).document["chunks"]
    assert (chunk["checkpoint"], chunk["claimed_by"], chunk["payload"]) == ({"sent": 7}, "relay:1", 2)
    assert "lease_token" not in chunk
    nothing = await durable("show", job_id, "-c", 2, "-c", 9)
    assert (nothing.code, nothing.err) == (3, "the job has no chunk 9\n")


async def test_of_a_long_value_show_prints_the_beginning_and_json_all(gateway: Connection, worker: Connection) -> None:
    job_id = await sql.submit(gateway)
    (lease,) = await sql.claim(worker)
    await sql.complete(worker, lease, "x" * 100_000)
    ended = await durable("show", job_id, "--chunk", 1)
    assert len(ended.out) < 6000
    assert ended.out.endswith("… and 96,002 characters more: --json has all of it\n")
    (chunk,) = (await durable("show", job_id, "-c", 1, "--json")).document["chunks"]
    assert len(chunk["outcome"]) == 100_000


async def test_a_terminal_obeys_nothing_that_others_have_written(gateway: Connection, worker: Connection) -> None:
    job_id = await sql.submit(gateway, kind="evil\x1b]0;")
    (lease,) = await sql.claim(worker, kinds=["evil\x1b]0;"], by="relay\x1b[2J")
    await sql.tell_errors(worker, lease, [{"row": 1, "code": "\x1b[31m", "message": "red\nnext", "data": "\x9b"}])
    await sql.fail(worker, lease, "\x1b[31mred\u202e", retryable=False)
    await sql.finish(worker, job_id)
    for command in ("show", "events", "errors"):
        for option in ((), ("--json",)):
            ended = await durable(command, job_id, *option)
            assert not set("\x1b\x9b\u202e") & set(ended.out), command
    assert not set("\x1b\u202e") & set((await durable("list")).out)
    # And is the same value.
    assert lines(await durable("errors", job_id, "--json"))[0]["code"] == "\x1b[31m"


async def test_what_is_not_there_is_exit_code_three() -> None:
    unknown = uuid4()
    for command in ("list", "show", "watch", "events", "errors", "pause", "resume", "retry"):
        ended = await durable(command, *([unknown] if command != "list" else []))
        assert (ended.code, ended.out) == (3, ""), command
        assert ended.err, command
    for more in (
        ("cancel", unknown, "--yes"),
        ("resolve", unknown, "done", 1),
        ("resolve", unknown, "done", "--all", "-y"),
    ):
        assert (await durable(*more)).code == 3, more


# --- control ----------------------------------------------------------------------------------------------------------


async def test_a_cancellation_does_not_say_that_a_transaction_cannot_commit_which_does(
    gateway: Connection, worker: Connection, admin: Connection
) -> None:
    """What a handler has said before is fenced: it commits, though the job is cancelled meanwhile."""
    await admin.execute(
        "alter function relay.durable_sweep_chunks(text, uuid, text[], text, text, bigint[], text, bigint, bigint)"
        " set lock_timeout = '10ms'"
    )
    job_id = await sql.submit(gateway, 2)
    (lease,) = await sql.claim(worker)
    async with worker.transaction():
        await sql.complete(worker, lease)
        done = await durable("cancel", job_id, "--yes")
        assert (done.code, done.out) == (0, "")
        assert done.err == (
            f"{job_id}: cancelled, and 1 chunk with it; 1 chunk in a handler's transaction: from now on it can say"
            " nothing more\n"
        )
    assert await sql.states(gateway, job_id) == ["done", "cancelled"]
    job = await sql.job(gateway, job_id, fresh=False)
    assert job is not None
    assert (job["chunks_done"], job["chunks_running"]) == (1, 0)


async def test_pause_and_resume_say_what_they_really_did(gateway: Connection, worker: Connection) -> None:
    job_id = await sql.submit(gateway, 3)
    await sql.claim(worker, 2)
    first = await durable("pause", job_id, "--note", "disk full")
    assert (first.code, first.out) == (0, "")
    assert first.err == f"{job_id}: paused; 2 chunks under way, to be given back or done\n"
    again = await durable("pause", job_id, "--json")
    assert again.code == 0
    assert again.document == [
        {
            "job_id": str(job_id), "tenant": "acme", "outcome": "already", "was": "paused", "status": "paused",
            "chunks": 0, "running": 2,
        }
    ]  # fmt: skip
    assert (await durable("resume", job_id)).err == f"{job_id}: goes on, it is running\n"
    assert (await durable("resume", job_id)).err == f"{job_id}: was not paused, it is running\n"
    (paused,) = [e for e in lines(await durable("events", job_id, "--json")) if e["type"] == "paused"]
    assert (paused["actor"], paused["channel"], paused["detail"]["note"]) == (getpass.getuser(), "cli", "disk full")


async def test_what_has_ended_or_waits_for_a_person_is_neither_paused_nor_cancelled(
    gateway: Connection, worker: Connection, admin: Connection
) -> None:
    waiting, over = await reviewed(gateway, worker, admin), await sql.submit(gateway)
    await sql.control(gateway, over, "cancel")
    ended = await durable("pause", waiting, over, uuid4())
    assert ended.code == 1
    refused, late, unknown = ended.err.splitlines()
    assert refused.endswith(
        "refused: it waits for a person, and durable resolve comes first (durable show tells for what)"
    )
    assert late == f"{over}: too late, it is cancelled"
    assert unknown.endswith("not there, or of a tenant that this login may not see")
    assert (await durable("cancel", waiting, "--yes")).code == 1
    assert (await durable("retry", over)).err == f"{over}: refused, it is cancelled\n"
    assert await sql.status(gateway, waiting) == "needs_review"


async def test_cancel_needs_a_yes_and_takes_the_open_chunks_along(gateway: Connection, worker: Connection) -> None:
    job_id = await sql.submit(gateway, 3)
    (lease,) = await sql.claim(worker)
    refused = await durable("cancel", job_id)
    assert (refused.code, refused.out) == (2, "")
    assert "without a terminal nobody can be asked: give --yes" in refused.err
    assert await sql.status(gateway, job_id) == "running"
    done = await durable("cancel", job_id, "--yes", "--actor", "alice")
    assert (done.code, done.err) == (0, f"{job_id}: cancelled, and 3 chunks with it\n")
    assert await sql.heartbeat(worker, lease) == ["stale"]
    again = await durable("cancel", job_id, "-y")
    assert (again.code, again.err) == (0, f"{job_id}: was cancelled already\n")


async def test_retry_has_failed_chunks_run_again_and_says_how_many(gateway: Connection, worker: Connection) -> None:
    job_id = await failed(gateway, worker)
    ended = await durable("retry", job_id)
    assert (ended.code, ended.err) == (0, f"{job_id}: 1 failed chunk to be run again, it is running\n")
    again = await durable("retry", job_id)
    assert (again.code, again.err) == (0, f"{job_id}: nothing of it had failed, it is running\n")
    assert len(await sql.claim(worker)) == 1


async def test_resolve_decides_about_chunks_that_wait_and_leaves_the_others(
    gateway: Connection, worker: Connection, admin: Connection
) -> None:
    job_id = await reviewed(gateway, worker, admin, 4)
    done = await durable("resolve", job_id, "done", 1, "--note", "it is in the log")
    assert (done.code, done.err) == (0, f"chunk 1: taken as done\njob {job_id} is needs_review\n")
    late = await durable("resolve", job_id, "failed", 1, 2, "--json")
    assert late.code == 1
    assert [(row["seq"], row["outcome"], row["chunk_status"]) for row in late.document] == [
        (1, "too_late", "done"), (2, "applied", "failed")
    ]  # fmt: skip
    assert (await durable("resolve", job_id, "done", 9)).code == 3
    refused = await durable("resolve", job_id, "retry", "--all")
    assert (refused.code, refused.out) == (2, "")
    rest = await durable("resolve", job_id, "retry", "--all", "--yes")
    assert rest.code == 0
    assert rest.err == (
        f"chunk 3: to be run again, with all attempts\nchunk 4: to be run again, with all attempts\n"
        f"job {job_id} is running\n"
    )
    assert await sql.states(gateway, job_id) == ["done", "failed", "retry", "retry"]
    (told, *_) = [e for e in lines(await durable("events", job_id, "--json")) if e["type"] == "resolved"]
    assert (told["seq"], told["detail"]["decision"], told["detail"]["note"]) == (1, "done", "it is in the log")


async def test_an_id_that_two_tenants_have_must_be_told_apart(gateway: Connection) -> None:
    job_id = uuid4()
    for tenant in ("acme", "globex"):
        await sql.submit(gateway, tenant=tenant, job_id=job_id)
    for arguments in (("show", job_id), ("pause", job_id), ("cancel", job_id, "--yes"), ("resolve", job_id, "done", 1)):
        ended = await durable(*arguments)
        assert (ended.code, ended.out) == (2, "")
        assert f"both acme and globex have a job {job_id}: name one by --tenant" in ended.err
    assert (await durable("pause", job_id, "--tenant", "globex")).code == 0
    assert (await sql.status(gateway, job_id), await sql.status(gateway, job_id, tenant="globex")) == (
        "queued",
        "paused",
    )


# --- events and errors ------------------------------------------------------------------------------------------------


async def test_events_and_errors_are_read_to_the_end_a_page_at_a_time(
    gateway: Connection, worker: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "PAGE", 3)
    job_id = await sql.submit(gateway, 7)
    leases = await sql.claim(worker, 2)
    for lease in leases:
        bad = [{"row": n, "code": "AGE", "message": "not a number", "data": {"age": "x"}} for n in range(1, 5)]
        await sql.tell_errors(worker, lease, bad)
    for _ in range(5):
        await sql.claim(worker)
    told = await durable("events", job_id, "--json")
    assert [event["type"] for event in lines(told)] == ["submitted", "started", *["chunk_claimed"] * 6]
    assert lines(told)[2]["detail"]["seqs"] == [1, 2]
    cursor = re.fullmatch(r"to go on from here: --after '(.*)'\n", told.err)
    assert cursor is not None
    await durable("pause", job_id)
    later = await durable("events", job_id, "--after", cursor[1])
    assert re.fullmatch(rf"[-\d]+ [:.\d]+  paused +by {getpass.getuser()} \(cli\)  was: running\n", later.out)
    assert len(lines(await durable("events", job_id, "--json", "-n", 2))) == 2

    found = lines(await durable("errors", job_id, "--json"))
    assert [(row["chunk"], row["row"]) for row in found] == [(seq, n) for seq in (1, 2) for n in (1, 2, 3, 4)]
    some = await durable("errors", job_id, "--chunk", 2, "-n", 3)
    assert some.err == "there are more than 3 bad rows: --limit\n"
    assert re.fullmatch(r'chunk +2  row +1  AGE  not a number  \{"age": "x"\}', some.out.splitlines()[0])
    assert (await durable("errors", job_id, "-c", 7)).err == "no row was bad\n"
    assert (await durable("errors", job_id, "-c", 8)).code == 3


async def test_behind_a_cursor_within_a_page_comes_its_rest_and_then_what_is_new(
    gateway: Connection, worker: Connection
) -> None:
    """One command shows both; also where nothing is left of the page."""
    job_id = await sql.submit(gateway, 9)
    for _ in range(2):
        await sql.claim(worker)
    for limit, left in ((2, ["chunk_claimed"] * 3), (5, ["chunk_claimed"])):
        begun = await durable("events", job_id, "--json", "--limit", limit)
        cursor = re.fullmatch(r"to go on from here: --after '(.*)'\n", begun.err)
        assert cursor is not None
        assert ";" in cursor[1]
        await sql.claim(worker)
        told = [event["type"] for event in lines(await durable("events", job_id, "--json", "--after", cursor[1]))]
        assert told == left
        page = await DurableRepository(gateway).events("acme", job_id, after=cursor[1])
        assert page.events


async def test_events_are_followed_until_the_job_has_ended(
    gateway: Connection, worker: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "FOLLOW_SECONDS", 0.05)
    job_id = await sql.submit(gateway)
    ended: list[Ended] = []
    async with anyio.create_task_group() as group:

        async def follow() -> None:
            ended.append(await durable("events", job_id, "--follow", "--json"))

        group.start_soon(follow)
        (lease,) = await sql.claim(worker)
        await sql.complete(worker, lease)
        await sql.finish(worker, job_id)
    assert [event["type"] for event in lines(ended[0])] == ["submitted", "started", "chunk_claimed", "completed"]


async def test_lines_that_nobody_reads_any_more_end_the_command_as_they_end_others(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    job_id = await sql.submit(gateway)
    (lease,) = await sql.claim(worker)
    await sql.tell_errors(worker, lease, [{"row": n, "code": "AGE", "message": "x" * 200} for n in range(5000)])
    command = [*COMMAND, "durable", "errors", str(job_id), "--json"]

    def read_one_line() -> tuple[bytes, int, bytes]:
        environ = environment(RELAY_DISPATCH_DSN=database.operator_dsn)
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            process.stdout.close()
            return line, process.wait(30), process.stderr.read()

    line, code, err = await anyio.to_thread.run_sync(read_one_line)
    assert json.loads(line)["row"] == 0
    assert (code, err) == (128 + signal.SIGPIPE, b"")


async def test_what_is_no_cursor_is_a_usage_error(gateway: Connection) -> None:
    job_id = await sql.submit(gateway)
    ended = await durable("events", job_id, "--after", "yesterday")
    assert (ended.code, ended.out) == (2, "")


# --- watch ------------------------------------------------------------------------------------------------------------


async def test_watch_tells_by_push_how_far_a_job_is_and_ends_with_it(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    job_id = await sql.submit(gateway, 2, rows=10)
    channel = await gateway.fetchval("select relay.channel('durable_watch', 'acme')")
    async with await anyio.open_process(
        [*COMMAND, "durable", "watch", str(job_id), "--interval", "60", "--json"],
        env=environment(RELAY_DISPATCH_DSN=database.operator_dsn),
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        told = b""

        async def until(fraction: float) -> None:
            nonlocal told
            with anyio.fail_after(20):
                while f'"fraction": {fraction}'.encode() not in told:
                    told += await process.stdout.receive()  # type: ignore[union-attr]

        await until(0.0)
        first, second = await sql.claim(worker, 2)
        await sql.complete(worker, first, rows_done=9, rows_failed=1)
        # As the relay's doorbell does.
        await eventually(lambda: _listens(gateway), message="the watch listens")
        await worker.execute("select pg_notify($1, $2)", channel, job_id.hex)
        await until(0.5)
        await sql.complete(worker, second, rows_done=10)
        await sql.finish(worker, job_id)
        with anyio.fail_after(20):
            async for piece in process.stdout:
                told += piece
            assert await process.wait() == 1
    last = json.loads(told.splitlines()[-1])
    assert (last["status"], last["rows_done"], last["rows_failed"]) == ("completed_with_errors", 19, 1)


async def _listens(anybody: Connection) -> bool:
    found: bool = await anybody.fetchval(
        "select count(*) > 0 from pg_stat_activity"
        " where datname = current_database() and application_name like '%watch'"
    )
    return found


async def test_watch_goes_on_when_its_sessions_were_cut(
    gateway: Connection, worker: Connection, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["gateway_sdk.durable_cli.watch"], "AGAIN_SECONDS", 0.01)
    job_id = await sql.submit(gateway)
    (lease,) = await sql.claim(worker)
    ended: list[Ended] = []
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            ended.append(await durable("watch", job_id, "--interval", 0.2))

        group.start_soon(watch)
        await eventually(lambda: _listens(gateway), message="the watch listens")
        await admin.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and application_name like 'relay-dispatch durable%'"
        )
        await eventually(lambda: _listens(gateway), message="the watch listens again")
        await sql.complete(worker, lease)
        await sql.finish(worker, job_id)
    assert ended[0].code == 0
    assert "completed  100.0%" in ended[0].out


async def test_watch_elsewhere_than_at_a_terminal_is_a_line_for_each_change(
    gateway: Connection, worker: Connection
) -> None:
    job_id = await sql.submit(gateway)
    (lease,) = await sql.claim(worker)
    ended = await durable("watch", job_id, "--timeout", 0)
    assert (ended.code, ended.err) == (1, "not ended within 0 seconds; it goes on\n")
    assert re.fullmatch(r"\d\d:\d\d:\d\d  running +0.0%  chunks: 1 running\n", ended.out)
    await sql.complete(worker, lease, rows_done=3)
    await sql.finish(worker, job_id)
    over = await durable("watch", job_id)
    assert over.code == 0
    line, last = over.out.splitlines()
    assert line.endswith("completed  100.0%  3 rows; chunks: 1 done")
    assert re.fullmatch(rf"{job_id} completed in \d\.\d s: 3 rows; 1 done", last)


async def test_watch_ends_where_a_person_has_to_decide(
    gateway: Connection, worker: Connection, admin: Connection
) -> None:
    job_id = await reviewed(gateway, worker, admin)
    ended = await durable("watch", job_id)
    assert ended.code == 1
    assert ended.err == f"1 chunk to be decided about by a person: relay-dispatch durable show {job_id}\n"


def at_a_terminal(
    database: TestDatabase, *arguments: object, answer: str = "", stdout: bool = False
) -> tuple[int, str]:
    """Run a command at a terminal; return its code, and what the terminal showed."""
    theirs, ours = pty.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, "durable", *map(str, arguments)],
            env=environment(RELAY_DISPATCH_DSN=database.operator_dsn, TERM="xterm"),
            stdin=ours, stdout=ours if stdout else subprocess.DEVNULL, stderr=ours,
        ) as process:  # fmt: skip
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
            return process.wait(30), shown.decode()
    finally:
        os.close(theirs)


async def test_at_a_terminal_cancel_asks_and_watch_is_a_bar(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    job_id = await sql.submit(gateway, 4, rows=10)
    (lease,) = await sql.claim(worker)
    await sql.complete(worker, lease, rows_done=10)
    code, shown = await anyio.to_thread.run_sync(lambda: at_a_terminal(database, "cancel", job_id, answer="n\n"))
    assert code == 1
    assert f"{job_id}: import, running, 1 done, 3 pending" in shown
    assert "Cancel 1 job for good? [y/N]" in shown
    assert "nothing was changed" in shown
    assert await sql.status(gateway, job_id) == "running"
    code, shown = await anyio.to_thread.run_sync(
        lambda: at_a_terminal(database, "watch", job_id, "--timeout", 0, stdout=True)
    )
    assert code == 1
    for text in ("import", "running", "━", "25.0%", "10 of 40 rows; chunks: 1 done, 3 pending"):
        assert text in shown, text
    await sql.control(gateway, job_id, "cancel")
    code, shown = await anyio.to_thread.run_sync(lambda: at_a_terminal(database, "watch", job_id, stdout=True))
    assert code == 1
    assert "cancelled in" in shown.splitlines()[-1]


# --- who may, and with what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ("list", "--status", "lost"),
            ("list", "--limit", "0"),
            ("list", "--tenant", ""),
            ("show",),
            ("show", "no-id"),
        ),
        *(("show", JOB_ID, "--chunk", "0"), ("show", JOB_ID, "--status", "parked"), ("watch", "no-id")),
        *(("watch", JOB_ID, "--interval", "0"), ("events", JOB_ID, "-n", "0"), ("pause",), ("cancel", "--yes")),
        *(("resolve", JOB_ID), ("resolve", JOB_ID, "forget", "1"), ("resolve", JOB_ID, "done")),
        *(("resolve", JOB_ID, "done", "1", "--all"), ("resolve", JOB_ID, "done", "0")),
    ],
)
async def test_bad_input_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    ended = await durable(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err


async def test_an_operator_of_one_tenant_sees_and_changes_that_one_alone(
    database: TestDatabase, gateway: Connection
) -> None:
    foreign, own = await sql.submit(gateway), await sql.submit(gateway, tenant="globex")
    async with logins(database) as made:
        name = await made.create()
        await made.bind(name, "operator", "globex")
        dsn = ("--dsn", database.dsn(name))
        assert [row["job_id"] for row in (await durable("list", *dsn, "--json")).document] == [str(own)]
        for command in ("show", "events", "errors", "pause", "retry", "watch"):
            assert (await durable(command, foreign, *dsn)).code == 3, command
        refused = await durable("list", "--tenant", "acme", *dsn)
        assert (refused.code, "S2R-TENANCY-DENIED" in refused.err) == (1, True)
        assert (await durable("cancel", own, "--yes", *dsn)).code == 0
    assert await sql.status(gateway, foreign) == "queued"


async def test_a_worker_sees_and_decides_nothing(database: TestDatabase, gateway: Connection) -> None:
    """A chunk is all that it is shown, by claiming it."""
    job_id = await sql.submit(gateway)
    dsn = ("--dsn", database.worker_dsn)
    for arguments in (
        *(("list",), *((command, job_id) for command in ("show", "events", "errors", "watch"))),
        *(("pause", job_id), ("cancel", job_id, "--yes"), ("resolve", job_id, "done", 1)),
    ):
        ended = await durable(*arguments, *dsn)
        assert (ended.code, "S2R-TENANCY-DENIED" in ended.err) == (1, True), ended.err


async def test_without_a_dsn_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAY_DISPATCH_DSN")
    ended = await durable("list")
    assert (ended.code, "give --dsn or set RELAY_DISPATCH_DSN" in ended.err) == (2, True)


async def test_a_database_without_the_room_is_exit_code_four(bare_database: TestDatabase) -> None:
    for room in (None, "dispatch"):
        if room is not None:
            await migrate(bare_database.admin_dsn, only=[room])
        for arguments in (("list",), ("pause", uuid4()), ("watch", uuid4())):
            ended = await durable(*arguments, "--dsn", bare_database.admin_dsn)
            assert (ended.code, ended.out) == (4, "")
            assert "relay-dispatch db migrate --only durable\n" in ended.err


async def test_a_database_that_does_not_answer_is_exit_code_five_without_password_or_traceback() -> None:
    env = {"RELAY_DISPATCH_DSN": "postgresql://somebody:s3cret@127.0.0.1:1/nowhere"}
    for arguments in (("list",), ("watch", str(uuid4()))):
        ended = await spawn_cli("durable", *arguments, env=env)
        assert (ended.code, ended.out) == (5, "")
        assert "Traceback" not in ended.err
        assert "s3cret" not in ended.err


async def test_every_command_explains_itself() -> None:
    group = await durable("--help")
    names = ("list", "show", "watch", "pause", "resume", "cancel", "retry", "resolve", "events", "errors")
    for name in names:
        assert name in group.out
        ended = await durable(name, "--help")
        assert ended.code == 0
        assert "Exit code" in ended.out
        assert f"relay-dispatch durable {name}" in ended.out
