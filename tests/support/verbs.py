"""Every function of the protocol that takes a tenant, ready to be called; and who may call it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg

from tests.support.protocol import ME, RELAY, Connection

Verbs: TypeAlias = "tuple[str, ...]"

_SECONDS = timedelta(seconds=9)


def verbs(tenant: str | None, relay: str | None, job_id: UUID) -> dict[str, tuple[str, list[Any]]]:
    """Every function that a login may call and that takes a tenant, with arguments."""
    none = [None]
    return {
        "enqueue": (
            "relay.enqueue($1, $2, $3, '{Get}', array['{}'], array[''::bytea], '{1}', $4, '{null}', '{null}')",
            [tenant, [uuid4()], [relay or RELAY], [_SECONDS]],
        ),
        "enqueue_keyed": (
            "relay.enqueue_keyed($1, $2, $3, 'Get', '{}', '', 1, $4, null, null, $5)",
            [tenant, uuid4(), relay or RELAY, _SECONDS, str(uuid4())],
        ),
        "enqueue_bounded": (
            "relay.enqueue_bounded($1, $2, $3, '{Get}', array['{}'], array[''::bytea], '{1}', $4, null, null, '{9}')",
            [tenant, [uuid4()], [relay or RELAY], [_SECONDS]],
        ),
        "enqueue_keyed_bounded": (
            "relay.enqueue_keyed_bounded($1, $2, $3, 'Get', '{}', '', 1, $4, null, null, $5, 9)",
            [tenant, uuid4(), relay or RELAY, _SECONDS, str(uuid4())],
        ),
        "poll": ("relay.poll($1, $2)", [tenant, [job_id]]),
        "list_jobs": ("relay.list_jobs($1)", [tenant]),
        "backlog": ("relay.backlog($1)", [tenant]),
        "mark_expired": ("relay.mark_expired($1, $2)", [tenant, [job_id]]),
        "purge": ("relay.purge($1, '0 s', 10)", [tenant]),
        "claim": ("relay.claim($1, $2, 10, $3, $4, $5)", [relay, [tenant], ME, uuid4(), _SECONDS]),
        "claim_again": ("relay.claim_again($1, $2, $3, $4)", [relay, [tenant], ME, job_id]),
        "fetch_body": ("relay.fetch_body($1, $2, $3, 1, $4)", [relay, tenant, job_id, ME]),
        "heartbeat": ("relay.heartbeat($1, $2, $3, $4, '{1}', $5)", [relay, ME, [tenant], [job_id], _SECONDS]),
        "complete": (
            "relay.complete($1, $2, $3, '{1}', $4, '{1}', '{succeeded}', '{null}', null, $5, null, null, true)",
            [relay, ME, [tenant], [job_id], none],
        ),
        "retry": (
            "relay.retry($1, $2, $3, $4, '{1}', $5, '{f}', '{e}', '{m}')",
            [relay, ME, [tenant], [job_id], [timedelta(0)]],
        ),
        "release": ("relay.release($1, $2, $3, $4, '{1}', '{f}')", [relay, ME, [tenant], [job_id]]),
        "promote_due": ("relay.promote_due($1, $2, 10)", [tenant, relay]),
        "reclaim": ("relay.reclaim($1, $2, 10, '1 us')", [relay, [tenant]]),
        "reclaim_lost": ("relay.reclaim_lost($1, $2, 10)", [tenant, relay]),
        "expire_late": ("relay.expire_late($1, $2, 10)", [tenant, relay]),
        "channel": ("relay.channel('wake', $1, $2)", [tenant, relay]),
        "ring": ("relay.ring('{wake}', $1, $2, '{null}')", [[tenant], [relay]]),
        "outbox_enqueue": ("relay.outbox_enqueue('kind', '1', p_tenant => $1)", [tenant]),
        "outbox_enqueue_many": ('relay.outbox_enqueue_many($1, \'[{"kind": "k", "payload": 1}]\')', [tenant]),
        "outbox_due": ("relay.outbox_due($1, null, 10, null, '5 min', 25, 10, null, null)", [[tenant]]),
        "outbox_claim": ("relay.outbox_claim($1, '{kind}', null, 10, $2)", [[tenant], ME]),
        "outbox_unclaim": ("relay.outbox_unclaim($1, $2)", [[tenant], ME]),
        "outbox_settle": (
            "relay.outbox_settle($1, $2, '{1}', $3, '{1}', '{delivered}', null, null, 25)",
            [ME, [tenant], [job_id]],
        ),
        "outbox_retry": ("relay.outbox_retry($1, $2)", [tenant, [job_id]]),
        "outbox_park": ("relay.outbox_park($1, $2, 'why')", [tenant, [job_id]]),
        "outbox_retry_parked": ("relay.outbox_retry_parked($1, '0 s', 10)", [tenant]),
        "outbox_purge": ("relay.outbox_purge($1, '0 s', 10)", [tenant]),
        "outbox_list": ("relay.outbox_list($1)", [tenant]),
        "outbox_count": ("relay.outbox_count($1)", [tenant]),
        "outbox_show": ("relay.outbox_show($1, $2)", [tenant, job_id]),
        "outbox_status": ("relay.outbox_status($1)", [tenant]),
        "outbox_health": ("relay.outbox_health($1)", [tenant]),
        **_durable(tenant, job_id),
    }


def _durable(tenant: str | None, job_id: UUID) -> dict[str, tuple[str, list[Any]]]:
    one, lease = [tenant, job_id], [tenant, job_id, job_id]
    many = [[tenant], [job_id], [job_id]]
    calls: dict[str, tuple[str, list[Any]]] = {
        "insert_job": ("$1, $2, 'kind', '{}', true, 3, 0, 'me'", [tenant, uuid4()]),
        "insert_chunks": ("$1, $2, '[]', 1", one),
        "seal": ("$1, $2", one),
        "abandon": ("$1, $2", one),
        "jobs": ("$1, $2", [tenant, [job_id]]),
        "chunks": ("$1, $2", one),
        "row_errors": ("$1, $2, 10", one),
        "events": ("$1, $2, null, 10", one),
        "query": ("$1, 'job'", [tenant]),
        "health": ("$1", [tenant]),
        "record_event": ("$1, $2, null, 'note', null, null, null, null", one),
        "set_job_status": ("$1, $2, '{queued}', 'running'", one),
        "update_job": ("$1, $2, '{}'", one),
        "set_chunk_statuses": ("$1, $2, '{pending}', 'cancelled'", one),
        "finish": ("$1, $2", [tenant, [job_id]]),
        "refresh_counters": ("$1, $2", one),
        "reap": ("$1, 'me', 10", [tenant]),
        "finish_lost": ("$1, 10", [tenant]),
        "control": ("$1, $2, 'pause'", one),
        "resolve": ("$1, $2, 1, 'done', 'me'", one),
        "retire": ("$1, '0 s', '0 s', 10", [tenant]),
        "remove": ("$1, 10", [tenant]),
        "claim": ("$1, '{kind}', null, 10, $2, $3, $4", [[tenant], ME, uuid4(), _SECONDS]),
        "claim_next": ("$1, $2, 10, $3, $4, $5", [*one, ME, uuid4(), _SECONDS]),
        "claim_chunk": ("$1, $2, 1, 0, $3, $4, $5", [*one, ME, uuid4(), _SECONDS]),
        "claim_again": ("$1, $2", [[tenant], job_id]),
        "candidates": ("$1, '{kind}', 10", [tenant]),
        "heartbeat": ("$1, $2, '{1}', $3, '{1}', $4", [*many, _SECONDS]),
        "checkpoint": ("$1, $2, 1, $3, 1, '{}'", lease),
        "complete": ("$1, $2, 1, $3, 1, '{}'", lease),
        "complete_many": ("$1, $2, '{1}', $3, '{1}', '{1}'", many),
        "fail": ("$1, $2, 1, $3, 1, 'm', true", lease),
        "release": ("$1, $2, '{1}', $3, '{1}'", many),
        "row_errors_add": ("$1, $2, 1, $3, 1, '[]'", lease),
    }
    return {f"durable_{name}": (f"relay.durable_{name}({text})", given) for name, (text, given) in calls.items()}


OPERATOR_VERBS: Verbs = (
    "poll", "list_jobs", "backlog", "mark_expired", "purge", "outbox_retry", "outbox_park",
    "outbox_retry_parked", "outbox_purge", "outbox_list", "outbox_count", "outbox_show", "outbox_status",
    "outbox_health", "durable_control", "durable_resolve", "durable_retire", "durable_remove",
    "durable_jobs", "durable_chunks", "durable_row_errors", "durable_events", "durable_query", "durable_health",
    "durable_record_event", "durable_set_job_status", "durable_update_job", "durable_set_chunk_statuses",
    "durable_refresh_counters",
)  # fmt: skip
GATEWAY_VERBS: Verbs = (
    "enqueue", "enqueue_keyed", "enqueue_bounded", "enqueue_keyed_bounded",
    "outbox_enqueue", "outbox_enqueue_many", "outbox_due", "outbox_claim", "outbox_unclaim",
    "outbox_settle", "durable_insert_job", "durable_insert_chunks", "durable_seal", "durable_abandon", *OPERATOR_VERBS,
)  # fmt: skip
WORKER_VERBS: Verbs = (
    "claim", "claim_again", "fetch_body", "heartbeat", "complete", "retry", "release", "promote_due",
    "durable_claim", "durable_claim_next", "durable_claim_chunk", "durable_claim_again", "durable_candidates",
    "durable_heartbeat", "durable_checkpoint", "durable_complete", "durable_complete_many", "durable_fail",
    "durable_release", "durable_row_errors_add",
)  # fmt: skip
COMMON_VERBS: Verbs = (
    "reclaim", "reclaim_lost", "expire_late", "channel", "ring",
    "durable_finish", "durable_reap", "durable_finish_lost",
)  # fmt: skip
# Chunks are a tenant's and no relay's: a worker that is bound to one relay of a tenant may work on them.
WITHOUT_RELAY = frozenset(name for name in (*WORKER_VERBS, *COMMON_VERBS) if name.startswith("durable_"))
# What a verb says of a durable job or a lease that there is not; the others say nothing of it.
OF_NOTHING = {
    "durable_insert_chunks": "S2030",
    "durable_seal": "S2030",
    "durable_checkpoint": "S2041",
    "durable_complete": "S2041",
    "durable_row_errors_add": "S2041",
}
# What each kind of login may call.
MAY_CALL: dict[str, Verbs] = {
    "gateway": (*GATEWAY_VERBS, *COMMON_VERBS),
    "worker": (*WORKER_VERBS, *COMMON_VERBS),
    "operator": (*OPERATOR_VERBS, *COMMON_VERBS),
}


async def sqlstate(connection: Connection, call: tuple[str, list[Any]], *, roll_back: bool = True) -> str | None:
    """Call a function in a transaction of its own; return the SQLSTATE, None where it went well."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.fetch(f"select * from {call[0]}", *call[1])
    except asyncpg.PostgresError as error:
        await transaction.rollback()
        return error.sqlstate
    await (transaction.rollback() if roll_back else transaction.commit())
    return None
