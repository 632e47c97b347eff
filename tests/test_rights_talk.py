"""What the server tells a session of what its calls do inside: no channel, no secret, nothing that is another's.

A session may ask the server to talk: of each channel that it notifies, of the parse tree and the plan of each
statement, also of those inside of functions that run as somebody else. In these trees a text is the list of its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from uuid import uuid4

import pytest

from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.protocol import ME, Connection, claimed_job, enqueue, logins
from tests.support.verbs import MAY_CALL, verbs

pytestmark = pytest.mark.invariant("I4")

_ALL_TALK = """
    set trace_notify = on; set client_min_messages = debug5; set log_parameter_max_length_on_error = -1;
    set debug_print_parse = on; set debug_print_rewritten = on; set debug_print_plan = on; set debug_pretty_print = off;
    set plan_cache_mode = force_custom_plan
"""
_NAME = re.compile(r"s2r_[0-9a-f]{40}|115 50 114 95 (?:4[89]|5[0-7]|9[7-9]|10[0-2]) ")


async def _talkative(connection: Connection) -> list[str]:
    """Let the connection be told all that a plain login may ask for; return where it is written."""
    said: list[str] = []
    connection.add_log_listener(
        lambda _connection, message: said.append(" ".join(map(str, message.as_dict().values())))
    )
    await connection.execute(_ALL_TALK)
    return said


def _bytes(secret: bytes) -> Callable[[str], bool]:
    signed = " ".join(str(byte - 256 if byte > 127 else byte) for byte in secret)
    return lambda text: signed in text or secret.hex() in text


async def test_a_session_is_not_told_the_channels_that_its_calls_ring(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    ended = await claimed_job(gateway, worker, tenant="a", relay="one")
    await durable.submit(gateway, 2, tenant="a")
    (lease,) = await durable.claim(worker, tenants=["a"])
    ids = uuid4().hex
    job, more, keyed, hidden = uuid4(), [uuid4(), uuid4()], uuid4(), uuid4()
    one_or_more = "relay.enqueue('a', $1, '{one}', '{Get}', null, null, null, '{1 min}', null, null, true)"
    rings: dict[str, list[tuple[str, list[object]]]] = {
        "worker": [
            ("relay.ring('{wake,result,durable,durable_watch}', '{a,a,a,a}', '{one,null,null,null}', $1)",
             [[None, ids, None, ids]]),
            ("relay.ring('{cancel}', '{a}', '{one}', $1)", [[ids]]),
            ("relay.complete('one', $1, '{a}', '{1}', $2, '{1}', null, null, null, null, null, null, true)",
             [ME, [ended.job_id]]),
            ("relay.durable_release('{a}', $1, $2, $3, $4, p_notify => true)",
             [[lease.job_id], [lease.seq], [lease.token], [lease.version]]),
        ],
        "gateway": [
            (one_or_more, [[job]]),
            (one_or_more, [more]),
            ("relay.enqueue_keyed('a', $1, 'one', 'Get', '{}', '', 1, '1 min', null, null, 'k', p_notify => true)",
             [keyed]),
            ("relay.outbox_enqueue('kind', '1', p_tenant => 'a')", []),
            ("relay.durable_insert_job('a', $1, 'import', '{}', true, 1, 0, 'me', true)", [hidden]),
            ("relay.durable_insert_chunks('a', $1, '[{\"payload\": 1}]')", [hidden]),
            ("relay.durable_seal('a', $1)", [hidden]),
            ("relay.durable_set_job_status('a', $1, '{running}', 'paused')", [lease.job_id]),
        ],
    }  # fmt: skip
    async with logins(database) as made:
        for kind, calls in rings.items():
            connection = await made.open(kind, "a", "one" if kind == "worker" else None)
            said = await _talkative(connection)
            for call, arguments in calls:
                said.clear()
                await connection.fetch(f"select * from {call}", *arguments)
                await connection.fetchval("select 1")
                assert any("PreCommit_Notify" in text or "DEBUG" in text for text in said), "the server does talk"
                assert [found for text in said if (found := _NAME.search(text))] == [], call


async def test_every_function_that_notifies_does_so_in_silence(admin: Connection) -> None:
    """And looks before whether the queue has room (D161). So that a new one cannot be forgotten."""
    rows = await admin.fetch(
        r"""select proname as name, 'trace_notify=off' = any (coalesce(proconfig, '{}'))
                   and prosrc ~ '\mpg_notification_queue_usage\M' as silent from pg_proc
            where pronamespace = 'relay'::regnamespace and prosrc ~ '\mpg_notify\M'"""
    )
    assert {row["name"] for row in rows} == {"notify", "ring", "outbox_ring", "durable_ring"}
    assert [row["name"] for row in rows if not row["silent"]] == []


async def test_no_verb_tells_a_talkative_session_the_secret_a_name_or_anothers_row(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Of each verb that a login may call, for its own tenant; each statement inside is parsed, planned and told."""
    marks = [b"body-of-b", b"operation-of-b", b"kind-of-b"]
    await enqueue(gateway, 2, tenant="b", relay="one", body=marks[0])
    await gateway.fetchval("select relay.outbox_enqueue('kind-of-b', '1', p_tenant => 'b')")
    await durable.submit(gateway, 1, tenant="b", kind="kind-of-b")
    secret = await admin.fetchval("select secret from relay.installation")
    for table in ("request", "queue"):
        await admin.execute(f"analyze relay.s2r_relay_dispatch_{table}")
    await admin.execute("analyze relay.outbox; analyze relay.durable_job")
    leaks: list[Callable[[str], bool]] = [_bytes(secret), *map(_bytes, marks)]
    leaks += [lambda text: any(mark.decode() in text for mark in marks)]
    async with logins(database) as made:
        for kind, names in MAY_CALL.items():
            connection = await made.open(kind, "a", "one" if kind == "worker" else None)
            said = await _talkative(connection)
            for name in names:
                if name == "channel":
                    continue  # this one's answer is a name, of a channel that is its own
                call, arguments = verbs("a", "one", uuid4())[name]
                said.clear()
                transaction = connection.transaction()
                await transaction.start()
                try:
                    await connection.fetch(f"select * from {call}", *arguments)
                except Exception as error:  # noqa: BLE001 - of a job that there is not
                    said.append(repr(error))
                await transaction.rollback()
                assert len(said) > 1, name
                found = [text[:300] for text in said if _NAME.search(text) or any(leak(text) for leak in leaks)]
                assert found == [], (kind, name)
