"""The schema, and what this login may do in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dispatch_core.cli.checks.finding import Finding, Verdict, all_rows
from dispatch_core.database import Connection, mapped_errors
from dispatch_core.errors import MigrationRightsError, TenancyDeniedError, TenancyUnboundError
from dispatch_core.migrate import status as read_status
from dispatch_core.tenancy import bypasses_row_security

__all__ = ["rights", "row_security", "schema"]

MEND_GRANT: Final = "relay-dispatch db grant LOGIN --as gateway|worker|operator --tenant T"

VERBS: Final[Mapping[str | None, Mapping[str, Sequence[str]]]] = {
    None: {"gateway": ("channel", "ring"), "worker": ("channel", "ring"), "operator": ()},
    "dispatch": {
        "gateway": ("enqueue", "enqueue_keyed", "enqueue_bounded", "enqueue_keyed_bounded", "poll", "mark_expired"),
        "worker": ("claim", "claim_again", "fetch_body", "heartbeat", "complete", "retry", "release", "reclaim"),
        "operator": ("poll", "list_jobs", "backlog", "mark_expired", "purge"),
    },
    "outbox": {
        "gateway": ("outbox_enqueue", "outbox_enqueue_many", "outbox_due", "outbox_claim", "outbox_settle"),
        "operator": (
            *("outbox_status", "outbox_health", "outbox_list", "outbox_count", "outbox_show"),
            *("outbox_retry", "outbox_retry_parked", "outbox_park", "outbox_purge"),
        ),
    },
    "durable": {
        "gateway": (
            *("durable_insert_job", "durable_insert_chunks", "durable_seal", "durable_abandon", "durable_jobs"),
            *("durable_events", "durable_row_errors", "durable_control", "durable_resolve"),
        ),
        "worker": (
            *("durable_claim", "durable_claim_again", "durable_heartbeat", "durable_checkpoint", "durable_complete"),
            *("durable_fail", "durable_release", "durable_row_errors_add", "durable_finish", "durable_run_sweeps"),
        ),
        "operator": (
            *("durable_jobs", "durable_chunks", "durable_row_errors", "durable_events", "durable_query"),
            *("durable_all_tenants", "durable_health", "durable_control", "durable_resolve"),
        ),
    },
}
"""What each kind of login must be able to call for its SDK to work, by the room that it works in."""


async def schema(dsn: str) -> list[Finding]:
    try:
        found = await read_status(dsn)
    except MigrationRightsError:
        return [Finding("schema", "fail", "this login may not use schema relay", MEND_GRANT)]
    values = {
        "state": found.state,
        "protocol": found.protocol,
        "sdk_protocol": found.sdk_protocol,
        "rooms": list(found.rooms),
    }
    if not found.usable:
        mends = {"incompatible": "upgrade relay-dispatch here", "drifted": "relay-dispatch db verify"}
        mend = mends.get(found.state, "relay-dispatch db migrate")
        return [Finding("schema", "fail", found.message, mend, values)]
    verdict: Verdict = "warn" if found.state == "pending" else "pass"
    return [
        Finding("schema", verdict, found.message, "relay-dispatch db migrate" if verdict == "warn" else None, values)
    ]


_OPEN_TABLES: Final = """
select c.relname::text as name
from pg_catalog.pg_class as c
join pg_catalog.pg_attribute as a on a.attrelid = c.oid and a.attname = 'tenant_id' and a.attnotnull
where c.relnamespace = 'relay'::regnamespace and c.relkind in ('r', 'p')
  and not (c.relrowsecurity and c.relforcerowsecurity)
order by 1
"""


async def row_security(conn: Connection, rooms: Sequence[str]) -> list[Finding]:
    with mapped_errors():
        reason = await bypasses_row_security(conn)
    if reason is not None:
        found = f"it does not bind this login, because {reason}"
        return [Finding("row security", "fail", found, f"use a plain login: {MEND_GRANT}", {"bypassed": True})]
    tables = [row["name"] for row in await all_rows(conn, _OPEN_TABLES)]
    if tables:
        found = f"not enabled and forced on {', '.join(tables)}"
        return [Finding("row security", "fail", found, "relay-dispatch db verify", {"open_tables": tables})]
    if "dispatch" not in rooms:  # the one room with a relation that some login may read
        found = "enabled and forced on every table, and no login but the owner has a right on one"
        return [Finding("row security", "pass", found, values={"bypassed": False})]
    try:
        await all_rows(conn, "select from relay.s2r_relay_dispatch limit 1")
    except TenancyDeniedError:
        found = "this login has no right on the tables, only on functions"
        return [Finding("row security", "pass", found, values={"bypassed": False})]
    except TenancyUnboundError:
        found = "in force: a read without a tenant is refused"
        return [Finding("row security", "pass", found, values={"bypassed": False})]
    found = "a tenant is bound to this login from its start, so that a call that names none is not refused"
    mend = "alter role LOGIN reset app.tenant_id, also for the database"
    return [Finding("row security", "warn", found, mend, {"bypassed": False})]


_MEMBERSHIPS: Final = """
select k.kind, pg_catalog.pg_has_role(session_user, g.oid, 'member') as member,
       pg_catalog.pg_has_role(session_user, g.oid, 'usage') as inherits
from unnest(array['gateway', 'worker', 'operator']) as k (kind)
join pg_catalog.pg_roles as g on g.rolname = 'relay_' || k.kind
"""
_CALLABLE: Final = """
select p.proname::text as name
from pg_catalog.pg_proc as p
where p.pronamespace = 'relay'::regnamespace and pg_catalog.has_function_privilege(p.oid, 'execute')
"""


async def rights(conn: Connection, rooms: Sequence[str]) -> list[Finding]:
    members = {row["kind"]: row["inherits"] for row in await all_rows(conn, _MEMBERSHIPS) if row["member"]}
    if not members:
        return [Finding("rights", "fail", "this login is neither a gateway, nor a worker, nor an operator", MEND_GRANT)]
    rows = await all_rows(conn, "select kind, tenant_id, relay_id from relay.my_bindings()")
    bindings = [dict(row) for row in rows]
    values = {"bindings": bindings, "member_of": sorted(members)}
    if not bindings:
        return [Finding("rights", "fail", "no binding: every call is answered S2R-TENANCY-DENIED", MEND_GRANT, values)]
    allowed = {row["name"] for row in await all_rows(conn, _CALLABLE)}
    kinds = sorted({binding["kind"] for binding in bindings})
    wanted = {
        kind: [verb for room, verbs in VERBS.items() if room is None or room in rooms for verb in verbs.get(kind, ())]
        for kind in kinds
    }
    lacking = {kind: [verb for verb in verbs if verb not in allowed] for kind, verbs in wanted.items()}
    findings = [
        Finding("rights", "fail", f"as {kind}, it may not call {', '.join(verbs)}", MEND_GRANT, values)
        for kind, verbs in lacking.items()
        if verbs
    ]
    if findings:
        return findings
    shown = "; ".join(_binding(binding) for binding in bindings[:4])
    more = f"; and {len(bindings) - 4} more" if len(bindings) > 4 else ""
    return [Finding("rights", "pass", f"{shown}{more}", None, values)]


def _binding(binding: Mapping[str, Any]) -> str:
    tenant = "every tenant" if binding["tenant_id"] is None else f"tenant {binding['tenant_id']}"
    if binding["kind"] != "worker":
        return f"{binding['kind']} for {tenant}"
    relay = "every relay" if binding["relay_id"] is None else f"relay {binding['relay_id']}"
    return f"worker for {tenant}, {relay}"
