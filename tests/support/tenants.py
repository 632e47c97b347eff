"""Two tenants with two relays each, something in every state, and every value of theirs marked with whose it is.

For tests of rights: what an attacker is told is searched for marks that are not its own, and what is stored is compared
with what was, version by version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import Completion, DispatchRequest
from tests.support import durable, outbox
from tests.support.protocol import Connection, end_lease, pass_deadline

TENANTS = ("a", "b")
RELAYS = ("one", "two")
# What a login that is bound to tenant a (a worker: and to relay one) may see the marks of.
OWN = {
    "worker": {"mark-a-one", "mark-a-durable"},
    "gateway": {"mark-a-one", "mark-a-two", "mark-a-outbox", "mark-a-durable"},
    "operator": {"mark-a-one", "mark-a-two", "mark-a-outbox", "mark-a-durable"},
}
_MARK = re.compile(r"mark-[ab]-(?:one|two|outbox|durable)")


@dataclass
class World:
    """What there is: ids by their states."""

    jobs: dict[tuple[str, str], dict[str, UUID]] = field(default_factory=dict)
    events: dict[str, dict[str, UUID]] = field(default_factory=dict)
    durable: dict[str, dict[str, UUID]] = field(default_factory=dict)

    def ids(self, *, tenant: str, relay: str | None = None) -> set[UUID]:
        """All ids of a tenant; the jobs of one of its relays alone where given."""
        jobs = [ids for (of, at), ids in self.jobs.items() if of == tenant and relay in (None, at)]
        rest = [] if relay else [self.events[tenant], self.durable[tenant]]
        return {one for ids in (*jobs, *rest) for one in ids.values()}

    def leaks(self, said: object, kind: str) -> list[str]:
        """What of others' is in what a login of that kind was told."""
        text = repr(said)
        marks = {mark for mark in _MARK.findall(_and_from_hex(text)) if mark not in OWN[kind]}
        foreign = self.ids(tenant="b") | (self.ids(tenant="a", relay="two") if kind == "worker" else set())
        return sorted(marks) + [str(one) for one in foreign if str(one) in text or one.hex in text]


def _and_from_hex(text: str) -> str:
    return text + "".join(bytes.fromhex(h).decode("latin-1") for h in re.findall(r"(?:[0-9a-f]{2}){8,}", text))


async def build(admin: Connection, gateway: Connection, worker: Connection) -> World:
    """Make it, by logins that are bound to everything."""
    world = World()
    for tenant in TENANTS:
        for relay in RELAYS:
            world.jobs[tenant, relay] = await _jobs(admin, gateway, worker, tenant, relay)
        world.events[tenant] = await _events(gateway, tenant)
        world.durable[tenant] = await _durable(admin, gateway, worker, tenant)
    await worker.execute("select relay.sweep_turn('expire:two', '1 hour'), relay.durable_sweep_turn('lease', '1 hour')")
    return world


async def _jobs(admin: Connection, gateway: Connection, worker: Connection, tenant: str, relay: str) -> dict[str, UUID]:
    mark = f"mark-{tenant}-{relay}"
    gate, work = RelayDispatchRepository(gateway, tenant), RelayDispatchRepository(worker, tenant)

    def requests(count: int, **options: Any) -> list[DispatchRequest]:
        return [
            DispatchRequest(relay, mark, body=mark.encode(), headers={"of": mark}, ttl=600, max_attempts=3, **options)
            for _ in range(count)
        ]

    ids = dict(zip(("claimed", "lost", "ok", "failed", "gone"), await gate.enqueue_many(requests(5)), strict=True))
    claimed = (await work.claim(relay, claimed_by=f"holder-{mark}", limit=5)).jobs
    fences = {job.job_id: job.fence for job in claimed}
    body: dict[str, Any] = {"response_body": mark.encode(), "response_headers": {"of": mark}}
    await work.complete_many(
        relay,
        [
            Completion(ids["ok"], fences[ids["ok"]], **body),
            Completion(ids["failed"], fences[ids["failed"]], status="failed", error_code="E", error_message=mark),
        ],
        claimed_by=f"holder-{mark}",
    )
    await gate.mark_expired(ids["gone"])
    ids |= dict(zip(("ready", "late"), await gate.enqueue_many(requests(2)), strict=True))
    (ids["delayed"],) = await gate.enqueue_many(requests(1, delay=300.0))
    ids["keyed"] = await gate.enqueue(relay, mark, body=mark.encode(), ttl=600, idempotency_key=f"key-{mark}")
    await end_lease(admin, ids["lost"])
    await pass_deadline(admin, ids["late"])
    return ids


async def _events(gateway: Connection, tenant: str) -> dict[str, UUID]:
    mark = f"mark-{tenant}-outbox"
    claimed, parked = await outbox.write(gateway, mark, mark, kind=f"kind-{mark}", tenant=tenant)
    await outbox.take(gateway, 1, kind=f"kind-{mark}", tenant=tenant, by=f"drainer-{mark}")
    await gateway.fetch("select * from relay.outbox_park($1, $2, $3)", tenant, [parked], mark)
    first, waiting = await outbox.write(gateway, mark, mark, kind=f"kind-{mark}", tenant=tenant, key=f"key-{mark}")
    return {"claimed": claimed, "parked": parked, "first": first, "waiting": waiting}


async def _durable(admin: Connection, gateway: Connection, worker: Connection, tenant: str) -> dict[str, UUID]:
    mark = f"mark-{tenant}-durable"
    kind, by = f"kind-{mark}", f"holder-{mark}"

    async def submit(chunks: int, **options: Any) -> UUID:
        return await durable.submit(gateway, chunks, tenant=tenant, kind=kind, **options)

    reviewed = await submit(1, idempotent=False)
    await durable.claim_next(worker, reviewed, tenant=tenant, by=by)
    await durable.run_out(admin)
    await durable.reap(worker, tenant=tenant)
    running = await submit(4)
    one, two, three = await durable.claim_next(worker, running, 3, tenant=tenant, by=by)
    await durable.checkpoint(worker, one, mark, tenant=tenant)
    await durable.tell_errors(worker, one, [{"row": 1, "code": mark, "message": mark}], tenant=tenant)
    await durable.complete(worker, two, mark, tenant=tenant)
    await admin.execute(
        f"update {durable.CHUNK} set lease_expires_at = now() where lease_token = $1 and seq = 3", one.token
    )
    assert three.seq == 3
    paused = await submit(1)
    await durable.control(gateway, paused, "pause", tenant=tenant, actor=mark)
    ended = await submit(1)
    await durable.control(gateway, ended, "cancel", tenant=tenant, actor=mark)
    queued = await submit(2)
    for table in (durable.JOB, durable.CHUNK):
        column = "params" if table == durable.JOB else "payload"
        await admin.execute(f"update {table} set {column} = to_jsonb($1::text) where tenant_id = $2", mark, tenant)
    return {"reviewed": reviewed, "running": running, "paused": paused, "ended": ended, "queued": queued}


async def audit(admin: Connection, *, but: tuple[str, str | None, str] | None = None) -> dict[str, list[str]]:
    """Every row of the schema, with where its version is, who wrote it and who has locked it.

    `but`: without what is a tenant's (of one of its relays, where given), and without the turns of that login.
    """
    tables = await admin.fetch(
        """select c.oid::regclass::text as name, array_agg(a.attname::text) as columns
           from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
           where c.relnamespace = 'relay'::regnamespace and c.relkind in ('r', 'p') group by c.oid"""
    )
    found: dict[str, list[str]] = {}
    for table in tables:
        where, arguments = "true", []
        if but is not None:
            tenant, relay, login = but
            if "tenant_id" in table["columns"] and table["name"] != "relay.role_binding":
                where, arguments = "t.tenant_id <> $1", [tenant]
                if relay is not None and "relay_id" in table["columns"]:
                    where, arguments = "(t.tenant_id, t.relay_id) <> ($1, $2)", [tenant, relay]
            elif "role_oid" in table["columns"]:
                where, arguments = "t.role_oid <> to_regrole(quote_ident($1))", [login]
        rows = await admin.fetch(
            f"select t.ctid || ' ' || t.xmin || ' ' || t.xmax || ' ' || t::text from {table['name']} t"
            f" where {where} order by 1",
            *arguments,
        )
        found[table["name"]] = [row[0] for row in rows]
    return found
