"""What a login writes has a size that whoever reads it can bear: each field, by raw SQL, at its limit and above.

SDKs refuse earlier, by their own settings; a stolen login need not be used by an SDK. And what is short as it is stored
may be long as it is read: 1e131000 is eight bytes of JSON, and a text of 131,001.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from dispatch_core import RelayDispatchRepository, TooLargeError
from dispatch_core.models import Completion
from relay_sdk import DispatchJob, Reply
from tests.support import durable, outbox
from tests.support.databases import TestDatabase
from tests.support.gateway import open_client
from tests.support.protocol import ME, Connection, claimed_job, logins
from tests.support.relays import RELAY, TENANT, new_relay, running

pytestmark = pytest.mark.invariant("I4")

KIB, MIB = 1024, 1024 * 1024
# So many of these are a text of more than 8 MiB, and of less than 1 kB as they are sent.
_LONG = "[" + ",".join(["1e131000"] * 70) + "]"


async def _refused(call: Awaitable[object], state: str = "S2022") -> None:
    with pytest.raises(asyncpg.PostgresError) as caught:
        await call
    assert caught.value.sqlstate == state


_COMPLETE = (
    "select outcome from relay.complete($1, $2, '{a}', '{1}', array[$3::uuid], array[$4::bigint], array[$5::text],"
    " null, array[$6::text], array[$7::bytea], array[$8::text], array[$9::text])"
)
_RETRY = (
    "select outcome from relay.retry('one', $1, '{a}', array[$2::uuid], array[$3::bigint], array['0 s'::interval],"
    " '{f}', array[$4::text], array[$5::text])"
)


async def test_a_result_is_refused_above_its_limits_and_the_job_is_still_the_holders(
    database: TestDatabase, gateway: Connection
) -> None:
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        job = await claimed_job(gateway, thief, tenant="a", relay="one")

        async def complete(headers: str = "{}", body: bytes = b"", code: str = "E", message: str = "m") -> Any:
            return await thief.fetchval(
                _COMPLETE, "one", ME, job.job_id, job.fence, "failed", headers, body, code, message
            )

        await _refused(complete(body=b"x" * (8 * MIB + 1)))
        await _refused(complete(headers=json.dumps({"a": "x" * 2 * MIB})))
        await _refused(complete(headers=_LONG))
        await _refused(complete(headers='{"a": ' + _LONG + "}"))
        await _refused(complete(code="é" * 101))
        await _refused(complete(message="x" * (8 * KIB + 1)))
        for code, message in (("x" * 201, "m"), ("E", "x" * (8 * KIB + 1))):
            await _refused(thief.fetchval(_RETRY, ME, job.job_id, job.fence, code, message))
        # One that is compressed on its way, as from a table of the attacker's, is what it is when it is read.
        await thief.execute("create temp table mine as select repeat('x', 9000000)::bytea as body")
        sql = _COMPLETE.replace("$7::bytea", "(select body from mine)").replace("$8", "$7").replace("$9", "$8")
        await _refused(thief.fetchval(sql, "one", ME, job.job_id, job.fence, "failed", "{}", "E", "m"))
        repository = RelayDispatchRepository(gateway, "a")
        assert (found := await repository.poll_status(job.job_id)) is not None
        assert found.status == "claimed"
        largest = (json.dumps({"a": "x" * (2 * MIB - 20)}), b"x" * 8 * MIB, "x" * 200, "x" * 8 * KIB)
        assert await complete(*largest) == "applied"
        found = await repository.poll_status(job.job_id)
        assert found is not None
        assert (len(found.response_body or b""), len(found.error_message or "")) == (8 * MIB, 8 * KIB)


async def test_an_answer_to_many_polls_is_bounded_whatever_the_results_are(
    database: TestDatabase, gateway: Connection
) -> None:
    """Batches of a gateway: 4 MiB of bodies and headers, and one result more, which alone has 10 MiB at most."""
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        jobs = [await claimed_job(gateway, thief, tenant="a", relay="one") for _ in range(6)]
        for job in jobs:
            assert await thief.fetchval(
                _COMPLETE, "one", ME, job.job_id, job.fence, "failed", json.dumps({"a": "x" * (2 * MIB - 20)}),
                b"x" * 3 * MIB, "x" * 200, "x" * 8 * KIB,
            ) == "applied"  # fmt: skip
        rows = await gateway.fetch("select * from relay.poll('a', $1)", [job.job_id for job in jobs])
        assert [row["fits"] for row in rows] == [True, *[False] * 5]
        size = sum(
            len(row[name] or "") for row in rows for name in ("response_headers", "response_body", "error_message")
        )
        assert size < 4 * MIB + 10 * MIB + 6 * 8 * KIB


async def test_a_request_is_refused_above_its_limits(database: TestDatabase) -> None:
    """A relay may serve the tenants of many gateways, with one claim for all of them."""
    async with logins(database) as made:
        thief = await made.open("gateway", "a")
        one = (
            "select relay.enqueue('a', array[$1::uuid], '{one}', '{Get}', array[$2::text], array[$3::bytea], null,"
            " '{1 min}', null, null)"
        )
        keyed = "select relay.enqueue_keyed('a', $1, 'one', 'Get', $2, $3, 1, '1 min', null, null, 'key')"
        for sql in (one, keyed):
            await _refused(thief.execute(sql, uuid4(), "{}", b"x" * (8 * MIB + 1)))
            await _refused(thief.execute(sql, uuid4(), json.dumps({"a": "x" * 2 * MIB}), b""))
            await _refused(thief.execute(sql, uuid4(), _LONG, b""))
            await thief.execute(sql, uuid4(), "{}", b"x" * 8 * MIB)


async def test_what_a_holder_says_of_a_chunk_is_refused_above_its_limits(
    database: TestDatabase, gateway: Connection
) -> None:
    job_id = await durable.submit(gateway, 2, tenant="a")
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        lease, last = await durable.claim_next(thief, job_id, 2, tenant="a", by="x" * 200)
        own: dict[str, Any] = {"tenant": "a"}
        sql = {
            "checkpoint": "select relay.durable_checkpoint('a', $1, $2, $3, $4, $5::text::jsonb)",
            "complete": "select relay.durable_complete('a', $1, $2, $3, $4, $5::text::jsonb)",
            "one of many": "select relay.durable_complete_many('{a}', array[$1::uuid], array[$2::bigint],"
            " array[$3::uuid], array[$4::bigint], array[$5::text])",
            "many": "select relay.durable_complete_many('{a,a}', array[$1::uuid, $1], array[$2::bigint, 9],"
            " array[$3::uuid, $3], array[$4::bigint, $4], array[$5::text, $5])",
        }
        for call in sql.values():
            for value in (json.dumps("x" * MIB), _LONG):
                await _refused(thief.execute(call, *lease.fence, value))
        for error in (
            {"row": 1, "code": "x" * 201},
            {"row": 1, "message": "x" * (8 * KIB + 1)},
            {"row": 1, "data": "x" * 128 * KIB},
        ):
            await _refused(durable.tell_errors(thief, lease, [{"row": 2}, error], **own))
        await _refused(durable.fail(thief, lease, "x" * (8 * KIB + 1), **own))
        await durable.checkpoint(thief, lease, "x" * (MIB - 2), **own)
        largest = {"row": 1, "code": "x" * 200, "message": "x" * 8 * KIB, "data": "x" * (128 * KIB - 2)}
        assert await durable.tell_errors(thief, lease, [largest], **own) == 1
        assert await durable.complete(thief, lease, "x" * (MIB - 2), **own) == ("applied", True)
        assert await durable.fail(thief, last, "x" * 8 * KIB, **own) == "retry"


async def test_the_name_of_a_holder_and_the_length_of_a_lease_are_bounded(
    database: TestDatabase, gateway: Connection
) -> None:
    """They are shown in lists; and what a thief holds when his login is taken from him is free in a day at most."""
    job_id = await durable.submit(gateway, 2, tenant="a")
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        more_of_it = "$1, gen_random_uuid(), make_interval(secs => $2))"
        dispatch = f"select * from relay.claim('one', '{{a}}', 1, {more_of_it}"
        chunks = f"select * from relay.durable_claim('{{a}}', '{{import}}', null, 1, {more_of_it}"
        chunk = f"select * from relay.durable_claim_chunk('a', $3, 1, 0, {more_of_it}"
        for sql, more in ((dispatch, ()), (chunks, ()), (chunk, (job_id,))):
            for name, seconds in (("", 1.0), ("x" * 201, 1.0), ("é" * 101, 1.0), ("me", 86401.0), ("me", 0.0)):
                await _refused(thief.fetch(sql, name, seconds, *more), "S2020")
            await thief.fetch(sql, "x" * 200, 86400.0, *more)
        await _refused(
            thief.fetch("select * from relay.heartbeat('one', 'me', '{a}', $1, '{1}', '2 days')", [job_id]), "S2020"
        )
        await _refused(thief.fetch("select * from relay.durable_reap('a', $1, 10)", "x" * 201))


async def test_what_gateways_and_operators_write_of_durable_jobs_is_refused_above_its_limits(
    database: TestDatabase, gateway: Connection
) -> None:
    job_id = await durable.submit(gateway, 1, tenant="a")
    text, note = "x" * (8 * KIB + 1), json.dumps("x" * 128 * KIB)
    async with logins(database) as made:
        thief = await made.open("gateway", "a")
        insert = "select relay.durable_insert_job('a', $1, 'import', $2::text::jsonb, true, 3, 0, $3)"
        chunks = "select relay.durable_insert_chunks('a', $1, $2::text::jsonb)"
        event = "select relay.durable_record_event('a', $1, null, 'note', $2, $3, $4, $5::text::jsonb)"
        status = "select relay.durable_set_job_status('a', $1, '{queued}', 'paused', $2::text::jsonb, $3::text::jsonb)"
        for params in (json.dumps("x" * 8 * MIB), _LONG):
            await _refused(thief.execute(insert, uuid4(), params, None))
            await _refused(thief.execute(chunks, job_id, f'[{{"payload": 1}}, {{"payload": {params}}}]'))
            await _refused(thief.execute(status, job_id, f'{{"params": {params}}}', None))
            await _refused(
                thief.execute(
                    "select relay.durable_update_job('a', $1, $2::text::jsonb)", job_id, f'{{"params": {params}}}'
                )
            )
        await _refused(thief.execute(insert, uuid4(), "{}", text))
        for place in range(3):
            await _refused(thief.execute(event, job_id, *[text if n == place else None for n in range(3)], None))
        for detail in (note, _LONG):
            await _refused(thief.execute(event, job_id, None, None, None, detail))
            await _refused(thief.execute(status, job_id, "{}", f'{{"type": "note", "detail": {detail}}}'))
        await _refused(thief.execute(status, job_id, "{}", json.dumps({"type": "note", "actor": text})))
        await _refused(thief.execute(status, job_id, json.dumps({"last_error": text}), None))
        for call in (
            "durable_control('a', $1, 'pause', $2)",
            "durable_control('a', $1, 'pause', null, null, $2)",
            "durable_resolve('a', $1, 1, 'done', $2)",
            "durable_resolve('a', $1, 1, 'done', null, null, $2)",
        ):
            await _refused(thief.fetch(f"select * from relay.{call}", job_id, text))
        call = "select relay.durable_set_chunk_statuses('a', $1, '{pending}', 'cancelled', $2::text::jsonb)"
        await _refused(thief.execute(call, job_id, json.dumps({"last_error": text})))
        assert await durable.states(thief, job_id, tenant="a") == ["pending"]
        assert await durable.told(thief, job_id, tenant="a") == ["submitted"]


async def test_what_a_drainer_says_of_an_event_is_refused_above_its_limits(
    database: TestDatabase, gateway: Connection
) -> None:
    (event_id,) = await outbox.write(gateway, 1, tenant="a")
    text = "x" * (8 * KIB + 1)
    async with logins(database) as made:
        thief = await made.open("gateway", "a")
        claim = f"select * from relay.outbox_claim('{{a}}', '{{{outbox.KIND}}}', null, 1, $1)"
        await _refused(thief.fetch(claim, "x" * 201), "S2020")
        await thief.fetch(claim, "x" * 200)
        settle = "select * from relay.outbox_settle($1, '{a}', '{1}', $2, '{1}', '{failed}', array[$3::text], null, 25)"
        await _refused(thief.fetch(settle, "x" * 200, [event_id], text))
        await _refused(thief.fetch("select * from relay.outbox_park('a', $1, $2)", [event_id], text))
        rows = await thief.fetch(settle, "x" * 200, [event_id], text[1:])
        assert [row["outcome"] for row in rows] == ["applied"]


async def test_the_limits_are_the_installations_and_hold_from_the_next_call_on(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    repository = RelayDispatchRepository(worker, TENANT)

    async def complete(size: int) -> None:
        done = Completion(job.job_id, job.fence, response_body=b"x" * size)
        assert [s.outcome for s in await repository.complete_many(RELAY, [done], claimed_by=ME)] == ["applied"]

    await admin.execute("update relay.installation set max_value_bytes = 100000, max_checkpoint_bytes = 65536")
    with pytest.raises(TooLargeError) as caught:
        await complete(100_001)
    assert caught.value.code == "S2R-TOO-LARGE"
    assert str(caught.value) == "a body has 100001 bytes; this installation allows 100000"
    await admin.execute("update relay.installation set max_value_bytes = 20000000")
    await complete(10_000_000)
    for wrong in (65535, 536870913):
        await _refused(admin.execute(f"update relay.installation set max_value_bytes = {wrong}"), "23514")


async def test_a_relay_ends_a_job_whose_result_the_installation_refuses_and_goes_on(
    database: TestDatabase, admin: Connection
) -> None:
    """In a batch with others: each of those is stored."""
    await admin.execute("update relay.installation set max_value_bytes = 100000")
    relay = new_relay(database)

    @relay.handler("Do")
    async def do(job: DispatchJob) -> Reply:
        return Reply(body=b"x" * int(job.body))

    async with running(relay), open_client(database.gateway_dsn) as client:
        tenant = client.tenant(TENANT)
        sizes = [1, 100_001, 100_000, 200_000, 2]
        ids = [await tenant.enqueue(RELAY, "Do", body=str(size).encode(), ttl=60) for size in sizes]
        results = [await tenant.wait(job_id, timeout=30) for job_id in ids]
    assert [result.error_code for result in results] == [None, "S2R-RESULT-INVALID", None, "S2R-RESULT-INVALID", None]
    assert "this installation allows 100000" in (results[1].error_message or "")
