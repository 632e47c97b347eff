"""The store's methods to claim chunks. See `DurableJobStore`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from uuid import UUID

import anyio

from dispatch_core import durable_input as check
from dispatch_core.durable_caller import JoinableConnection
from dispatch_core.durable_models import ClaimedChunk, ClaimedChunks, DurableChunk, JobLease
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.durable_store import StoreBase
from dispatch_core.errors import ConnectionLostError, DatabaseUnavailableError, InvalidInputError
from dispatch_core.ids import new_id

__all__ = ["ClaimMethods"]

_CANDIDATES: Final = 10

_ASK_AGAIN_SECONDS: Final = (0.0, 0.1, 0.3, 1.0)
"""Before each time that a claim is asked for whose reply was lost: it may be under way on the server still."""


class ClaimMethods(StoreBase):
    """For workers."""

    def uses_skip_locked_claims(self) -> bool:
        """Whether the next chunk is claimed in one statement that steps over locked ones: as the setting says.

        Every supported PostgreSQL can; switched off, a claim looks for chunks and takes one by compare-and-set.
        """
        return self._settings.skip_locked_claims

    async def claim_chunk(
        self,
        chunk: DurableChunk,
        *,
        lease_ttl_seconds: float | None = None,
        holder: str | None = None,
        conn: JoinableConnection | None = None,
    ) -> JobLease | None:
        """Claim a chunk if it is still as it was read; None: somebody was first, or its job does not run.

        In the caller's transaction the lease is nobody else's to see before the commit, and gone after a rollback.
        Raises: as `claim_chunks`.
        """
        if not isinstance(chunk, DurableChunk):
            raise InvalidInputError(f"chunk must be a DurableChunk, not {type(chunk).__name__}")
        tenant, seq, version = self._tenant_of(chunk.tenant_id), chunk.seq, chunk.lease_version
        claimed = await self._claim_one(tenant, chunk.job_id, seq, version, holder, lease_ttl_seconds, conn)
        return claimed.chunks[0].lease if claimed.chunks else None

    async def claim_next_chunk_skip_locked(
        self, job_id: UUID, *, lease_ttl_seconds: float | None = None, holder: str | None = None
    ) -> ClaimedChunk | None:
        """Claim the chunk of a job with the lowest number that nobody has locked, in one call; None: there is none.

        Raises: as `claim_chunks`.
        """

        def claim(verbs: DurableRepository, holder: str, token: UUID) -> Awaitable[ClaimedChunks]:
            return verbs.claim_next(self._tenant, job_id, holder=holder, token=token, lease_seconds=lease_ttl_seconds)

        claimed = await self._claim(claim, self._tenant, holder, lease_ttl_seconds)
        return claimed.chunks[0] if claimed.chunks else None

    async def claim_next_chunk(
        self, job_id: UUID, *, lease_ttl_seconds: float | None = None, holder: str | None = None
    ) -> ClaimedChunk | None:
        """Claim a job's next chunk in the way that the setting says (`uses_skip_locked_claims`)."""
        if self.uses_skip_locked_claims():
            return await self.claim_next_chunk_skip_locked(job_id, lease_ttl_seconds=lease_ttl_seconds, holder=holder)
        before: list[tuple[UUID, int, int]] = []
        # Others may have had all of them; but where nothing has changed the job itself is locked, or does not run.
        while (found := await self._candidates(job_id)) != before:
            for _, seq, version in found:
                claimed = await self._claim_one(self._tenant, job_id, seq, version, holder, lease_ttl_seconds)
                if claimed.chunks:
                    return claimed.chunks[0]
            before = found
        return None

    async def claim_chunks(
        self,
        kinds: Sequence[str],
        *,
        limit: int = 1,
        lease_ttl_seconds: float | None = None,
        holder: str | None = None,
    ) -> ClaimedChunks:
        """Claim the next chunks among all jobs of these kinds: by priority, then age, then number; in one call.

        A reply that was lost is asked for, for a second or two.
        Raises: ConnectionLostError after that: what was claimed, if anything, is free again when the lease has ended.
        """

        def claim(verbs: DurableRepository, holder: str, token: UUID) -> Awaitable[ClaimedChunks]:
            return verbs.claim(
                [self._tenant], kinds, limit=limit, holder=holder, token=token, lease_seconds=lease_ttl_seconds
            )

        return await self._claim(claim, self._tenant, holder, lease_ttl_seconds)

    async def _candidates(self, job_id: UUID) -> list[tuple[UUID, int, int]]:
        return await self._repository.candidates(self._tenant, [], limit=_CANDIDATES, job_id=job_id)

    async def _claim_one(
        self,
        tenant: str | None,
        job_id: UUID,
        seq: int,
        version: int,
        holder: str | None,
        lease_ttl_seconds: float | None,
        conn: JoinableConnection | None = None,
    ) -> ClaimedChunks:
        def claim(verbs: DurableRepository, holder: str, token: UUID) -> Awaitable[ClaimedChunks]:
            return verbs.claim_chunk(
                tenant, job_id, seq, version, holder=holder, token=token, lease_seconds=lease_ttl_seconds
            )

        return await self._claim(claim, tenant, holder, lease_ttl_seconds, conn)

    async def _claim(
        self,
        claim: Callable[[DurableRepository, str, UUID], Awaitable[ClaimedChunks]],
        tenant: str | None,
        holder: str | None,
        lease_ttl_seconds: float | None,
        conn: JoinableConnection | None = None,
    ) -> ClaimedChunks:
        name = self._holder if holder is None else check.name("holder", holder)
        ttl = self._settings.lease_seconds if lease_ttl_seconds is None else lease_ttl_seconds
        deadline = time.monotonic() + check.span("lease_ttl_seconds", ttl).total_seconds()
        token = new_id()
        if conn is not None:
            return await claim(self._verbs(conn), name, token)
        try:
            return await claim(self._repository, name, token)
        except ConnectionLostError:
            # Without asking, a chunk that may not run twice would wait for a person because of a broken connection.
            for pause in _ASK_AGAIN_SECONDS:
                await anyio.sleep(pause)
                with contextlib.suppress(DatabaseUnavailableError):
                    found = await self._repository.claim_again([tenant], token, holder=name, local_deadline=deadline)
                    if found.chunks:
                        return found
            raise
