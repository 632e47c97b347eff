"""What is stored comes back as it was, what cannot be is refused before it could do harm (C34)."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import (
    InvalidBodyError,
    InvalidHeadersError,
    InvalidInputError,
    InvalidNameError,
    MalformedHeadersError,
    TenancyUnboundError,
)
from dispatch_core.models import Completion, DispatchRequest, DispatchResult, PutBack
from tests.support.protocol import (
    ME,
    QUEUE,
    RELAY,
    REQUEST,
    RESULT,
    TENANT,
    Connection,
    claim,
    claimed_job,
    enqueue,
    pass_deadline,
    retry,
    said,
    settle,
    snapshot,
    stored,
)

TRICKY = [
    "plain",
    "MiXed Case",
    'o\'quote "double" `back`',
    "semi; drop table relay.s2r_relay_dispatch_queue; --",
    "per%cent %s %L {0} $1 $$",
    "back\\slash \\u0000 literal",
    "tab\tnew\nline\r",
    " surrounded ",
    "ünïcödé 漢字 🚚 \u202e rtl \ufeff bom",
    "\x01\x1f\x7f",
    "é" * 100,
]


@pytest.mark.case("C34")
async def test_names_headers_and_bodies_come_back_exactly(gateway: Connection, worker: Connection) -> None:
    body = bytes(range(256)) * 3 + b"\\x00\\u0000" + "\ud7ff\ue000".encode()
    for text in TRICKY:
        name = text[:90]
        tenant, relay, operation = f"t{name}", f"r{name}", f"o{name}"
        headers: dict[str, str | list[str]] = {text: text, "list": [text, ""], "": "", "e": []}
        repository = RelayDispatchRepository(gateway, tenant)
        job_id = await repository.enqueue(relay, operation, headers, body, idempotency_key=name)
        (job,) = await claim(worker, tenant=tenant, relay=relay, by=f"i{name}")
        assert (job.job_id, job.tenant_id, job.relay_id, job.operation) == (job_id, tenant, relay, operation)
        assert (job.request_headers, job.body) == (headers, body)
        told = await settle(
            worker,
            job,
            by=f"i{name}",
            response_headers=headers,
            response_body=body[::-1],
            error_code=text[:90],
            error_message=text,
        )
        assert said(told) == ("applied", "succeeded")
        result = await repository.poll_status(job_id)
        assert result is not None
        assert (result.response_headers, result.response_body) == (headers, body[::-1])
        assert (result.error_code, result.error_message) == (text[:90], text)


@pytest.mark.case("C34")
@pytest.mark.parametrize("bad", ["\0", "a\0b", "\ud800", "x\udfff"])
async def test_nul_and_lone_surrogates_are_refused_before_any_sql(
    admin: Connection, gateway: Connection, worker: Connection, bad: str
) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    (waiting,) = await enqueue(gateway)
    before = await snapshot(admin)
    calls: list[tuple[type[Exception], dict[str, Any]]] = [
        (InvalidNameError, {"relay_id": bad, "operation": "Get"}),
        (InvalidNameError, {"relay_id": RELAY, "operation": bad}),
        (InvalidNameError, {"relay_id": RELAY, "operation": "Get", "idempotency_key": bad}),
        (InvalidHeadersError, {"relay_id": RELAY, "operation": "Get", "headers": {bad: "v"}}),
        (InvalidHeadersError, {"relay_id": RELAY, "operation": "Get", "headers": {"h": bad}}),
        (InvalidHeadersError, {"relay_id": RELAY, "operation": "Get", "headers": {"h": [bad]}}),
    ]
    for error, arguments in calls:
        with pytest.raises(error):
            await repository.enqueue(**arguments)
    with pytest.raises(InvalidNameError):
        RelayDispatchRepository(gateway, bad)
    assert await snapshot(admin) == before
    (job,) = await claim(worker)
    assert job.job_id == waiting
    with pytest.raises(InvalidHeadersError):
        await settle(worker, job, response_headers={"h": bad})
    with pytest.raises(InvalidHeadersError):
        await RelayDispatchRepository(worker, TENANT).complete(
            job.job_id, RELAY, job.fence, ME, "succeeded", None, {bad: ""}
        )
    assert said(await settle(worker, job, status="failed", error_code=bad, error_message=f"it said {bad}")) == (
        "applied",
        "failed",
    )
    result = await repository.poll_status(job.job_id)
    assert result is not None
    assert result.error_message is not None
    assert result.error_message.startswith("it said ")


@pytest.mark.case("C34")
async def test_a_lone_surrogate_in_a_text_body_is_refused_and_its_bytes_are_stored(gateway: Connection) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    with pytest.raises(InvalidBodyError):
        await repository.enqueue(RELAY, "Get", body="\ud800")
    await repository.enqueue(RELAY, "Get", body=b"\xed\xa0\x80\x00")


@pytest.mark.case("C34")
async def test_an_error_text_of_any_kind_and_length_is_stored_sanitised_and_bounded(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    for make_end in ("complete", "retry"):
        job = await claimed_job(gateway, worker)
        text = "\0\ud800" + "漢" * 1_000_000
        if make_end == "complete":
            told = await settle(worker, job, status="failed", error_code="E" * 5000, error_message=text)
        else:
            told = await retry(worker, job, error_code="E" * 5000, error_message=text)
        assert said(told) == ("applied", "failed")
        query = f"select octet_length(error_code), octet_length(error_message) from {RESULT} where job_id = $1"
        (lengths,) = await admin.fetch(query, job.job_id)
        code, message = lengths
        assert 0 < code <= 200
        assert 1000 < message <= 4000


@pytest.mark.parametrize("status", [1.5, "200", True, 2**63, -(2**63) - 1])
async def test_a_response_status_that_is_no_bigint_is_refused(
    gateway: Connection, worker: Connection, status: object
) -> None:
    job = await claimed_job(gateway, worker)
    with pytest.raises(InvalidInputError):
        await settle(worker, job, response_status=status)
    assert said(await settle(worker, job, response_status=-(2**63))) == ("applied", "succeeded")


async def test_large_bodies_and_results_go_through(gateway: Connection, worker: Connection) -> None:
    body = random.Random(3).randbytes(8 * 1024 * 1024)
    (job_id,) = await enqueue(gateway, body=body)
    with pytest.raises(InvalidBodyError):
        await enqueue(gateway, body=body + b"1")
    (job,) = await claim(worker)
    assert job.body_pending
    assert await RelayDispatchRepository(worker).fetch_body(job, claimed_by=ME)
    assert job.body == body
    assert said(await settle(worker, job, response_body=body)) == ("applied", "succeeded")
    result = await RelayDispatchRepository(gateway, TENANT).poll_status(job_id)
    assert result is not None
    assert result.response_body == body


# --- malformed stored headers -------------------------------------------------------------------

MALFORMED = ["[1, 2]", '"text"', "7", "null", '{"a": 1}', '{"a": null}', '{"a": ["x", 2]}', '{"a": {"b": "c"}}']


@pytest.mark.parametrize("headers", MALFORMED)
async def test_a_job_with_malformed_stored_headers_hurts_itself_alone_when_it_is_claimed(
    admin: Connection, gateway: Connection, worker: Connection, headers: str
) -> None:
    good = await enqueue(gateway, 2, headers={"h": "v"})
    (bad,) = await enqueue(gateway)
    last = await enqueue(gateway, 1)
    await admin.execute(f"update {REQUEST} set request_headers = $2::jsonb where job_id = $1", bad, headers)
    repository = RelayDispatchRepository(worker, TENANT)
    claimed = await repository.claim(RELAY, claimed_by=ME, limit=10)
    assert [job.job_id for job in claimed.jobs] == [*good, *last]
    (malformed,) = claimed.malformed
    assert (malformed.job_id, malformed.error.job_id, malformed.error.code) == (bad, bad, "S2R-HEADERS-INVALID")
    assert claimed.looked_at == 4
    end = Completion(bad, malformed.fence, status="failed", error_code="S2R-HEADERS-INVALID", error_message="malformed")
    (settled,) = await repository.complete_many(RELAY, [end], claimed_by=ME)
    assert said(settled) == ("applied", "failed")
    result = await RelayDispatchRepository(gateway, TENANT).poll_status(bad)
    assert result is not None
    assert (result.status, result.error_code) == ("failed", "S2R-HEADERS-INVALID")


@pytest.mark.parametrize("headers", MALFORMED)
async def test_a_result_with_malformed_stored_headers_raises_for_its_id_and_hurts_no_other(
    admin: Connection, gateway: Connection, worker: Connection, headers: str
) -> None:
    await enqueue(gateway, 2)
    good, bad = await claim(worker, 2)
    for job in (good, bad):
        await settle(worker, job, response_headers={"h": "v"})
    await admin.execute(f"update {RESULT} set response_headers = $2::jsonb where job_id = $1", bad.job_id, headers)
    repository = RelayDispatchRepository(gateway, TENANT)
    with pytest.raises(MalformedHeadersError) as malformed:
        await repository.poll_status(bad.job_id)
    assert malformed.value.job_id == bad.job_id
    many = await repository.poll_many([bad.job_id, good.job_id, uuid4()])
    assert isinstance(many[bad.job_id], MalformedHeadersError)
    answered = many[good.job_id]
    assert isinstance(answered, DispatchResult)
    assert answered.response_headers == {"h": "v"}
    assert len(many) == 2


async def test_headers_that_are_no_json_are_refused_by_the_functions_and_the_batch_stays_whole(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await gateway.fetch(
            "select * from relay.enqueue($1, $2, $3, $4, array['{}', '{']::text[], $5, '{1,1}', $6, $7, $8)",
            TENANT,
            [uuid4(), uuid4()],
            [RELAY] * 2,
            ["Get"] * 2,
            [b""] * 2,
            [timedelta(seconds=9)] * 2,
            [None] * 2,
            [None] * 2,
        )
    assert refused.value.sqlstate == "22P02"
    assert set((await stored(admin)).values()) == {0}
    await enqueue(gateway, 2)
    first, second = await claim(worker, 2)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await worker.fetch(
            "select * from relay.complete($1, $2, $3, '{2}', $4, $5, null, null, $6, null, null, null)",
            RELAY,
            ME,
            [TENANT],
            [first.job_id, second.job_id],
            [first.fence, second.fence],
            ["{}", '{"a": "\\u0000"}'],
        )
    assert refused.value.sqlstate == "22P05"
    assert await admin.fetchval(f"select count(*) from {QUEUE} where state = 'claimed'") == 2


# --- arguments of the repository ----------------------------------------------------------------


@pytest.mark.case("C39")
async def test_every_method_without_a_tenant_raises_unbound_and_sends_no_default(
    admin: Connection, gateway: Connection, worker: Connection, operator: Connection
) -> None:
    await enqueue(gateway)
    before = await snapshot(admin)
    with pytest.raises(TenancyUnboundError):
        RelayDispatchRepository(gateway, "")
    gate, work = RelayDispatchRepository(gateway), RelayDispatchRepository(worker)
    some = uuid4()
    calls = [
        lambda: gate.enqueue(RELAY, "Get"),
        lambda: gate.enqueue(RELAY, "Get", idempotency_key="k"),
        lambda: gate.enqueue_many([DispatchRequest(RELAY, "Get")]),
        lambda: gate.poll_status(some),
        lambda: gate.poll_many([some]),
        lambda: gate.mark_expired(some),
        lambda: gate.list_jobs(),
        lambda: gate.purge(0),
        lambda: gate.now(),
        lambda: gate.channel("result"),
        lambda: work.claim(RELAY, claimed_by=ME),
        lambda: work.claim_again(RELAY, claimed_by=ME, claim_id=some),
        lambda: work.heartbeat(RELAY, [(None, some, 1)], claimed_by=ME),
        lambda: work.complete(some, RELAY, 1, ME),
        lambda: work.complete_many(RELAY, [Completion(some, 1)], claimed_by=ME),
        lambda: work.retry(RELAY, [PutBack(some, 1)], claimed_by=ME),
        lambda: work.release(RELAY, [(None, some, 1, True)], claimed_by=ME),
        lambda: work.reclaim(RELAY, lease_seconds=0.001),
        lambda: work.now(),
        lambda: work.channel("wake", RELAY),
    ]
    for reused in (False, True):
        if reused:  # a custom setting that was once set in a session reads as '' afterwards, and not as null
            for connection in (gateway, worker):
                async with connection.transaction():
                    await connection.execute("set local app.tenant_id = 'acme'")
                assert await connection.fetchval("select current_setting('app.tenant_id', true)") == ""
        for number, call in enumerate(calls):
            with pytest.raises(TenancyUnboundError) as unbound:
                await call()  # type: ignore[no-untyped-call]
            assert unbound.value.code == "S2R-TENANCY-UNBOUND", number
    assert await snapshot(admin) == before


@pytest.mark.case("C39")
async def test_every_method_uses_the_tenant_that_the_caller_has_bound(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    gate, work = RelayDispatchRepository(gateway), RelayDispatchRepository(worker)
    async with gateway.transaction():
        await gateway.execute("set local app.tenant_id = 'acme'")
        job_id = await gate.enqueue(RELAY, "Get", max_attempts=5)
        keyed = await gate.enqueue(RELAY, "Get", idempotency_key="k")
        assert len(await gate.poll_many([job_id, keyed])) == 2
        assert len(await gate.list_jobs()) == 2
        ((ended, was_claimed),) = await gate.mark_expired_many([keyed])
        assert (ended.tenant_id, ended.relay_id, ended.job_id, was_claimed) == (TENANT, RELAY, keyed, False)
        await gate.now()
        await gate.channel("result")
        assert await gate.purge(0) == 1
        assert await gateway.fetchval("show app.tenant_id") == "acme"
    await worker.execute("set app.tenant_id = 'acme'")
    claim_id = uuid4()
    claimed = await work.claim(RELAY, claimed_by=ME, claim_id=claim_id)
    (job,) = claimed.jobs
    assert (job.job_id, job.tenant_id) == (job_id, TENANT)
    assert len((await work.claim_again(RELAY, claimed_by=ME, claim_id=claim_id)).jobs) == 1
    assert await work.heartbeat(RELAY, [(None, job_id, job.fence)], claimed_by=ME) == ["applied"]
    assert said((await work.release(RELAY, [(None, job_id, job.fence, True)], claimed_by=ME))[0])[1] == "pending"
    (job,) = (await work.claim(RELAY, claimed_by=ME, lease_seconds=1e-6)).jobs
    assert len(await work.reclaim(RELAY, lease_seconds=1e-6)) == 1
    (job,) = (await work.claim(RELAY, claimed_by=ME)).jobs
    assert await work.complete(job_id, RELAY, job.fence, ME) == 1
    assert await worker.fetchval("show app.tenant_id") == "acme"


async def test_a_list_of_jobs_is_paged_by_the_newest_and_narrowed_by_relay_and_status(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    ids = [(await enqueue(gateway, relay=RELAY if number % 2 else "crm"))[0] for number in range(6)]
    (job,) = await claim(worker)
    await settle(worker, job)
    await pass_deadline(admin, ids[0])
    page = await repository.list_jobs(limit=4)
    assert [item["job_id"] for item in page] == ids[:1:-1]
    assert [item["job_id"] for item in await repository.list_jobs(before=page[-1]["job_id"])] == ids[1::-1]
    assert [item["job_id"] for item in await repository.list_jobs(relay_id="crm")] == ids[4::-2]
    assert [item["job_id"] for item in await repository.list_jobs(status="succeeded")] == [job.job_id]
    assert [item["job_id"] for item in await repository.list_jobs(status="expired")] == [ids[0]]
    assert len(await repository.list_jobs(status="pending")) == 4
    with pytest.raises(InvalidInputError):
        await repository.list_jobs(status="cancelled")
