"""Call the durable room: checked at its first use, within a bound, again where that can do no harm, and cut off in
good order when the client ends.

Three kinds of call, by what may be done after an error that may pass:

    read     changes nothing                                              again, within `poll_timeout_seconds`
    write    changes nothing the second time: its ids are the caller's    again, within `write_timeout_seconds`
    decide   says what it did, which it could not say the second time     again only where nothing was done
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeVar, cast
from uuid import UUID

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.database import Connection, Database
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import (
    ConnectionLostError,
    DatabaseBusyError,
    DatabaseUnavailableError,
)
from dispatch_core.migrate import check_schema
from dispatch_core.settings import DurableJobsSettings
from gateway_sdk.bounded import bounded
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.under_way import UnderWay

__all__ = ["Calls", "Run"]

Answer = TypeVar("Answer")

Run: TypeAlias = Callable[[DurableRepository], Awaitable[Answer]]

_BACKOFF_BASE: Final = 0.05
_BACKOFF_CAP: Final = 1.0
_BUSY_TRIES: Final = 5
_POLL_TRIES: Final = 3

_ATTEMPT_SECONDS: Final = 5.0
"""At least so much of a call's time, or else half of it, is for one attempt: a dead connection must not use up all."""


class _CheckedError(Exception):
    """The arguments of a verb are good."""


class _NoConnection:
    """Where a verb ends that has checked its arguments, and would send them now."""

    async def fetch(self, *_: object) -> list[Any]:
        raise _CheckedError


class Calls(UnderWay):
    """The statements of a client in the durable room."""

    def __init__(self, database: Database, settings: GatewaySettings, durable: DurableJobsSettings | None) -> None:
        super().__init__()
        self.settings = settings
        self._database = database
        self._durable = durable
        # Polls never take all connections: what they ask for can wait.
        self._polls = anyio.Semaphore(max(1, database.max_size // 2), fast_acquire=True)
        self.is_used = False
        """The room is there, and somebody has asked something of it."""
        self.polls = 0
        """How many statements have read jobs for those who wait."""

    @property
    def durable(self) -> DurableJobsSettings:
        """The room's own settings; read when they are first needed. Raises: ConfigurationError."""
        if self._durable is None:
            self._durable = DurableJobsSettings.load()
        return self._durable

    # --- calls ----------------------------------------------------------------------------------------------------

    async def read(self, run: Run[Answer], job_id: UUID | None = None) -> Answer:
        """Run what changes nothing. Raises: as `write`; InvalidInputError, before a connection is asked for."""
        with self.under_way(job_id):
            await self._check(run)
            return await self.repeat(run, self.settings.poll_timeout_seconds, job_id)

    async def write(self, run: Run[Answer], job_id: UUID) -> Answer:
        """Run what changes nothing the second time.

        Raises: DatabaseUnavailableError or DatabaseBusyError with the job's id, when its time is over;
        SchemaMismatchError where the room is not there; ClientClosedError.
        """
        with self.under_way(job_id):
            return await self.repeat(run, self.settings.write_timeout_seconds, job_id)

    async def decide(self, run: Run[Answer], job_id: UUID) -> Answer:
        """Run what must not be done twice. Raises: as `read`; ConnectionLostError: whether it was done is unknown."""
        with self.under_way(job_id):
            await self._check(run)
            return await self.repeat(run, self.settings.write_timeout_seconds, job_id, after_loss=False)

    async def _check(self, run: Run[Answer]) -> None:
        # What is wrong with a call is said at once, whether or not there is a database, or a free connection.
        with suppress(_CheckedError):
            await run(DurableRepository(cast("Connection", _NoConnection()), self.durable))

    async def poll(self, run: Run[Answer]) -> Answer:
        """Run a read for those who wait: no more of them at once than half of the pool, and not for long."""
        async with self._polls:
            self.polls += 1
            return await self.repeat(run, self.settings.poll_timeout_seconds, tries=_POLL_TRIES)

    async def repeat(
        self,
        run: Run[Answer],
        seconds: float,
        job_id: UUID | None = None,
        *,
        after_loss: bool = True,
        in_transaction: bool = False,
        tries: int | None = None,
    ) -> Answer:
        """Run it until it succeeds, `seconds` are over, or it has failed so many times.

        `after_loss`: also where an attempt may have been done without our knowledge. `in_transaction`: in one.
        """
        until = time.monotonic() + seconds
        backoff = Backoff(_BACKOFF_BASE, _BACKOFF_CAP)

        async def attempt(conn: Connection) -> Answer:
            if not self.is_used:
                await check_schema(conn, rooms=["durable"])
                self.is_used = True
            repository = DurableRepository(conn, self.durable)
            if not in_transaction:
                return await run(repository)
            async with conn.transaction():
                return await run(repository)

        while True:
            left = until - time.monotonic()
            try:
                return await bounded(self._database, max(0.001, min(left, max(left / 2, _ATTEMPT_SECONDS))), attempt)
            except (DatabaseUnavailableError, DatabaseBusyError) as error:
                error.job_id = job_id
                pause = backoff.next()
                is_final = isinstance(error, ConnectionLostError) and not after_loss
                most = _BUSY_TRIES if isinstance(error, DatabaseBusyError) else tries
                if is_final or (most is not None and backoff.attempt >= most) or time.monotonic() + pause >= until:
                    raise
            await anyio.sleep(pause)
