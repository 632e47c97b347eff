"""The verbs by which durable jobs are read: nothing here changes or locks anything. See `DurableRepository`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from dispatch_core import codec
from dispatch_core import durable_input as check
from dispatch_core.durable_caller import typed
from dispatch_core.durable_calls import Calls, tenant_or_none
from dispatch_core.durable_models import ChunkStatus, DurableChunk, DurableJob, EventPage, QueryPage, RowError
from dispatch_core.durable_query import Filter, cursor_text, filter_json, shown, table_name
from dispatch_core.durable_rows import chunk_of, event_of, job_of, row_error_of
from dispatch_core.errors import InvalidInputError

__all__ = ["ReadingVerbs"]

_JOBS: Final = "select * from relay.durable_jobs($1::text, $2::uuid[], $3::boolean)"
_CHUNKS: Final = (
    "select * from relay.durable_chunks($1::text, $2::uuid, $3::bigint[], $4::bigint, $5::bigint, $6::text)"
)
_ROW_ERRORS: Final = (
    "select * from relay.durable_row_errors($1::text, $2::uuid, $3::bigint, $4::bigint, $5::bigint, $6::text,"
    " $7::bigint)"
)
_EVENTS: Final = "select * from relay.durable_events($1::text, $2::uuid, $3::text, $4::bigint)"
_QUERY: Final = (
    "select * from relay.durable_query($1::text, $2::text, $3::text::jsonb, $4::uuid, $5::text::jsonb, $6::bigint)"
)


class ReadingVerbs(Calls):
    """For gateways, operators and workers."""

    __slots__ = ()

    async def jobs(self, tenant: str | None, job_ids: Sequence[UUID], *, fresh: bool = False) -> list[DurableJob]:
        """Return those of the jobs that there are, in the order asked for. `fresh`: their counters are counted now."""
        name, ids = tenant_or_none(tenant), [check.identity("an item of job_ids", job_id) for job_id in job_ids]
        return [job_of(row, name) for row in await self._fetch(_JOBS, name, ids, check.flag("fresh", fresh))]

    async def chunks(
        self,
        tenant: str | None,
        job_id: UUID,
        *,
        seqs: Sequence[int] | None = None,
        after: int = 0,
        limit: int = 1000,
        status: ChunkStatus | str | None = None,
    ) -> list[DurableChunk]:
        """Return chunks of a job in their order: those of `seqs`, or a page of all behind `after`, in one status."""
        name = tenant_or_none(tenant)
        rows = await self._fetch(
            _CHUNKS,
            name,
            check.identity("job_id", job_id),
            None if seqs is None else [check.number("an item of seqs", seq) for seq in seqs],
            check.number("after", after),
            check.number("limit", limit, 1),
            None if status is None else check.one_of("status", status, ChunkStatus).value,
        )
        return [chunk_of(row, name) for row in rows]

    async def row_errors(
        self,
        tenant: str | None,
        job_id: UUID,
        *,
        limit: int = 1000,
        after: RowError | None = None,
        seq: int | None = None,
    ) -> list[RowError]:
        """Return a page of a job's bad rows, by chunk, row and code. `after`: the last one of the page before."""
        if after is not None and not isinstance(after, RowError):
            raise InvalidInputError(f"after must be a RowError, not {type(after).__name__}")
        rows = await self._fetch(
            _ROW_ERRORS,
            tenant_or_none(tenant),
            check.identity("job_id", job_id),
            check.number("limit", limit, 1),
            0 if after is None else check.count("seq of after", after.seq),
            -check.MAX_BIGINT - 1 if after is None else check.number("row of after", after.row),
            "" if after is None else check.text_or_none("code of after", after.code),
            check.count_or_none("seq", seq),
        )
        return [row_error_of(row) for row in rows]

    async def events(
        self, tenant: str | None, job_id: UUID, *, after: str | None = None, limit: int = 1000
    ) -> EventPage:
        """Return the events that come after a cursor (None: from the beginning), and the cursor to go on from.

        None is ever skipped, whenever its transaction commits. One that is empty is the last, as things stand; one that
        is not full need not be. Raises: InvalidInputError for what is no cursor.
        """
        args = tenant_or_none(tenant), check.identity("job_id", job_id)
        after = check.text_or_none("after", after, 1024 * 1024)
        limit = check.number("limit", limit, 1)
        while True:
            rows = await self._fetch(_EVENTS, *args, after, limit)
            page = EventPage([event_of(row) for row in rows[:-1]], rows[-1]["next_cursor"])
            # A cursor within a page asks for the rest of that page; what came later is behind it.
            if page.events or after is None or ";" not in after:
                return page
            after = page.next

    async def query(
        self,
        tenant: str | None,
        table: str,
        wanted: Filter | None = None,
        *,
        job_id: UUID | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> QueryPage:
        """Return rows of job, chunk, row_error or event that meet a filter, by their keys; jobs the newest first.

        `after`: that of the page before. For people: it reads on until it has `limit` rows that meet the filter.
        Raises: InvalidInputError for another table, column, operator or kind of value.
        """
        rows = await self._fetch(
            _QUERY,
            tenant_or_none(tenant),
            table_name(table),
            filter_json(table, wanted),
            None if job_id is None else check.identity("job_id", job_id),
            cursor_text(table, after),
            check.number("limit", limit, 1, 10_000),
        )
        items = [typed(shown(table, codec.decode_payload(row["item"]))) for row in rows]
        return QueryPage(items, rows[-1]["after"] if len(rows) == limit else None)
