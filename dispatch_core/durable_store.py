"""What the methods of the store of durable jobs stand on: whose jobs, on what connection, in whose transaction."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from dispatch_core import durable_input as check
from dispatch_core.database import Connection, Database, in_transaction, mapped_errors
from dispatch_core.durable_caller import CallersConnection, JoinableConnection
from dispatch_core.durable_models import JobLease
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import InvalidInputError, RelayDispatchError, TenancyMismatchError
from dispatch_core.ids import new_instance_id
from dispatch_core.settings import DurableJobsSettings

__all__ = ["StoreBase", "in_batches"]

_log = logging.getLogger("dispatch_core.durable")


class StoreBase:
    """See `DurableJobStore`."""

    def __init__(
        self,
        database: Database | Connection,
        tenant: str | None = None,
        *,
        settings: DurableJobsSettings | None = None,
        holder: str | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        """Take a `Database`, or a connection of asyncpg, on which nothing is relied; in its transaction, if it has one.

        `tenant` None: the one that is bound on the connection. `holder`: who claims, for people; default: a name of
        this store's own.
        """
        self._database = database
        self._tenant = None if tenant is None else check.name("tenant", tenant)
        self._settings = settings or DurableJobsSettings()
        self._holder = new_instance_id("durable") if holder is None else check.name("holder", holder)
        self._log = logger or _log
        own = database if isinstance(database, Database) else CallersConnection(_joinable(database), joins=False)
        self._repository = DurableRepository(own, self._settings)

    @property
    def settings(self) -> DurableJobsSettings:
        """What holds for leases, attempts and sizes."""
        return self._settings

    @property
    def holder(self) -> str:
        """Who claims, where a claim does not say it."""
        return self._holder

    def _verbs(self, conn: JoinableConnection | None) -> DurableRepository:
        if conn is None:
            return self._repository
        return DurableRepository(CallersConnection(_joinable(conn)), self._settings)

    @contextlib.asynccontextmanager
    async def _together(self, conn: JoinableConnection | None, statements: int) -> AsyncIterator[DurableRepository]:
        """Have several statements be in one transaction."""
        if conn is not None or statements < 2:
            yield self._verbs(conn)
        elif isinstance(self._database, Database):
            async with self._database.connection() as own, own.transaction():
                verbs = CallersConnection(own, joins=False) if self._database.is_borrowed else own
                yield DurableRepository(verbs, self._settings)
        elif in_transaction(self._database):
            yield self._repository
        else:
            with mapped_errors():
                async with self._database.transaction():
                    yield self._repository

    @property
    def _may_finish(self) -> bool:
        """Whether a statement of the store's is a transaction of its own: no job is ended in one that has a chunk."""
        return isinstance(self._database, Database) or not in_transaction(self._database)

    async def _finish_if(self, last: bool, lease: JobLease, conn: JoinableConnection | None) -> None:
        if not last or conn is not None or not self._may_finish:
            return
        try:
            await self._repository.finish(lease.tenant_id, [lease.job_id])
        except RelayDispatchError as error:
            # The chunk's end is stored, and that is what was asked for.
            self._log.warning("job %s could not be ended now, a sweep will: %s", lease.job_id, error)

    def _check(self, lease: JobLease) -> None:
        self._tenant_of(check.lease_of(lease).tenant_id)

    def _tenant_of(self, tenant: str | None) -> str | None:
        if tenant is not None and self._tenant is not None and tenant != self._tenant:
            raise TenancyMismatchError(f"a chunk of another tenant than this store's, which is {self._tenant}")
        return self._tenant if tenant is None else tenant


def _joinable(conn: Any) -> JoinableConnection:
    if not (hasattr(conn, "is_in_transaction") and hasattr(conn, "copy_from_query")):
        raise InvalidInputError(f"conn must be a connection of asyncpg, not {type(conn).__name__}")
    found: JoinableConnection = conn
    return found


def in_batches(texts: Sequence[bytes], most: int, most_bytes: int) -> Iterable[list[bytes]]:
    """Split texts into what goes into one statement each."""
    batch: list[bytes] = []
    size = 0
    for text in texts:
        if batch and (len(batch) >= most or size + len(text) > most_bytes):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch
