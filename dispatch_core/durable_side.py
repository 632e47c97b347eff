"""Tell an event from the side: best effort, bounded, and never to the harm of what it is told about."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from dispatch_core.database import Connection, Database, in_transaction, mapped_errors
from dispatch_core.durable_caller import CallersConnection
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.settings import DurableJobsSettings

__all__ = ["record_from_the_side"]

_SAVE = "savepoint s2r_event"
_FORGET = "release savepoint s2r_event"
_UNDO = "rollback to savepoint s2r_event"

# Beyond the lock timeout, for the statement itself and its way.
_GRACE_SECONDS = 5.0


async def record_from_the_side(
    database: Database | Connection,
    settings: DurableJobsSettings,
    logger: logging.Logger,
    record: Callable[[DurableRepository, float], Awaitable[bool]],
) -> bool:
    """Run `record` with a repository and a lock timeout; log what goes wrong; return whether it was written."""
    seconds = settings.event_lock_timeout_seconds
    try:
        if isinstance(database, Database):
            async with database.connection(within=seconds) as conn:
                beside = CallersConnection(conn, joins=False, timeout=seconds + _GRACE_SECONDS)
                written = await record(DurableRepository(beside, settings), seconds)
        else:
            written = await _on_a_connection(database, settings, record)
    except Exception as error:  # noqa: BLE001  whatever it is, the job it tells of is more
        logger.warning("an event of a durable job was not recorded: %s: %s", type(error).__name__, error)
        return False
    if not written:
        logger.warning("an event of a durable job was not recorded: there is no such job")
    return written


async def _on_a_connection(
    conn: Connection, settings: DurableJobsSettings, record: Callable[[DurableRepository, float], Awaitable[bool]]
) -> bool:
    seconds = settings.event_lock_timeout_seconds
    verbs = DurableRepository(CallersConnection(conn, joins=False, timeout=seconds + _GRACE_SECONDS), settings)
    if not in_transaction(conn):
        return await record(verbs, seconds)
    # In a transaction of the caller's, who would lose it to our failure, and keep our lock timeout.
    with mapped_errors():
        before = await verbs.lock_timeout()
        await conn.execute(_SAVE)
        try:
            written = await record(verbs, seconds)
        except BaseException:
            await conn.execute(_UNDO)
            await conn.execute(_FORGET)
            raise
        await verbs.set_lock_timeout(before)
        await conn.execute(_FORGET)
        return written
