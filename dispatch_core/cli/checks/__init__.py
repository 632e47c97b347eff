"""What `doctor` looks at: one function a subject, each of which reads and changes nothing.

A check returns findings and does not raise for what it was made to find. What PostgreSQL hides from a plain login
(other logins' statements and transactions) is left out, and the finding says how much that was.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from dataclasses import replace

from dispatch_core.cli.checks import durable, login, outbox, server, way
from dispatch_core.cli.checks.finding import Finding, Verdict, connection
from dispatch_core.errors import RelayDispatchError

__all__ = ["Finding", "Verdict", "examine"]


async def examine(
    dsn: str, listen_dsn: str | None = None, *, outbox_dsn: str | None = None, timeout: float = 5.0
) -> list[Finding]:
    """Make all checks; `listen_dsn` None: listening goes the same way as statements. `timeout` is seconds to connect.

    `outbox_dsn`: where events are kept, if not at `dsn`; what is checked there has names that begin with OUTBOX_DSN.

    Raises: DatabaseUnavailableError and the like where not even `dsn` can be reached.
    """
    findings: list[Finding] = []

    async def add(check: str, made: Awaitable[list[Finding]]) -> None:
        try:
            findings.extend(await made)
        except RelayDispatchError as error:
            findings.append(Finding(check, "fail", f"the check could not be made: {error}"))

    started = time.perf_counter()
    async with connection(dsn, timeout) as conn:
        await add("reach", way.reach(conn, time.perf_counter() - started))
        await add("version", way.version(conn))
        await add("pooler", way.pooler(conn, separate=listen_dsn is not None))
        await add("statements", way.statements(dsn, timeout))
        await add("listen", way.listen(listen_dsn or dsn, timeout))
        await add("clock", way.clock(conn))
        await add("schema", login.schema(dsn))
        if findings[-1].verdict != "fail":  # else there is nothing that the next four could read
            rooms = findings[-1].values.get("rooms")
            installed = [str(room) for room in rooms] if isinstance(rooms, list) else []
            await add("row security", login.row_security(conn, installed))
            await add("rights", login.rights(conn, installed))
            if "outbox" in installed or outbox_dsn in (None, dsn):
                await add("outbox", outbox.events(conn, installed))
            if "durable" in installed:
                await add("durable jobs", durable.jobs(conn))
        await add("listeners", server.listeners(conn))
        await add("transactions", server.transactions(conn))
        await add("settings", server.settings(conn))
    if outbox_dsn is not None and outbox_dsn != dsn:
        await add("OUTBOX_DSN", _outbox_at(outbox_dsn, timeout))
    return findings


async def _outbox_at(dsn: str, timeout: float) -> list[Finding]:
    """Check the outbox in a database of its own: the schema, what the login may do, and the events."""
    found = await login.schema(dsn)
    rooms = found[-1].values.get("rooms")
    if isinstance(rooms, list) and "outbox" not in rooms:
        mend = "relay-dispatch db migrate --only outbox"
        found = [Finding("schema", "fail", "the room outbox is not in the database that OUTBOX_DSN names", mend)]
    elif found[-1].verdict != "fail":
        async with connection(dsn, timeout) as conn:
            found += await login.row_security(conn, ["outbox"])
            found += await login.rights(conn, ["outbox"])
            found += await outbox.events(conn, ["outbox"])
    return [replace(finding, check=f"OUTBOX_DSN {finding.check}") for finding in found]
