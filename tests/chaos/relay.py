"""A relay process of the run: `python -m tests.chaos.relay NAME JOURNAL-DSN CLOCK-FILE`, the rest by environment."""

from __future__ import annotations

import sys

from tests.chaos import clock
from tests.support.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    clock.install(sys.argv[3])

import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

import anyio

from dispatch_core import RelayDispatchRepository
from dispatch_core.errors import DatabaseUnavailableError
from dispatch_core.models import Settled, WriteOutcome
from relay_sdk import ChunkContext, DispatchJob, Reject, Relay, Reply, Retry, Snooze, run_relays
from tests.chaos.journal import Journal, open_journal
from tests.chaos.logs import configure
from tests.chaos.roster import NOT_REACHED, SERVES


def make(relay_id: str, tenants: tuple[str, ...], journal: Journal) -> Relay:
    """Make a relay whose handlers do what a job's body says: wait, answer, refuse, ask for another time."""
    relay = Relay(relay_id, tenants=tenants)

    async def note(event: str, job: DispatchJob) -> None:
        said = json.loads(job.body)
        await journal.note(
            event, job.tenant_id, job.job_id, relay=relay_id, fence=job.fence, attempt=job.attempt,
            instance=relay.instance_id, sent_for=said.get("tenant"),
        )  # fmt: skip

    async def wait(job: DispatchJob, seconds: float) -> None:
        try:
            await anyio.sleep(seconds)
        except anyio.get_cancelled_exc_class():
            await note("interrupted", job)
            raise

    def answer(job: DispatchJob) -> Reply:
        # So that the audit sees whose answer was taken.
        return Reply(f"{job.tenant_id} {job.job_id} {job.attempt} {job.fence} {relay.instance_id}")

    @relay.handler("Work")
    async def work(job: DispatchJob) -> Reply:
        await note("began", job)
        said = json.loads(job.body)
        await wait(job, said["seconds"])
        if said["end"] == "retry" and not job.last_attempt:
            await note("put back", job)
            raise Retry(said["seconds"])
        if said["end"] == "reject":
            await note("ended", job)
            raise Reject("E-NO", "as asked")
        await note("ended", job)
        return answer(job)

    @relay.handler("Order")
    async def order(job: DispatchJob) -> Reply:
        await note("began", job)
        await note("ended", job)
        return answer(job)

    snoozed: set[object] = set()

    @relay.handler("Nap")
    async def nap(job: DispatchJob) -> Reply:
        await note("began", job)
        if job.job_id not in snoozed:
            snoozed.add(job.job_id)
            await note("snoozed", job)
            raise Snooze(0.2)
        await note("ended", job)
        return answer(job)

    if relay_id == "erp":

        @relay.chunk_handler("import")
        async def load(ctx: ChunkContext) -> None:
            """Store rows with the checkpoint that says so, ten at a time; each tenth row is a bad one."""
            count, first = ctx.payload["count"], ctx.payload["first"]
            at = int(ctx.checkpoint or 0)
            while at < count:
                ctx.stopping.check()
                async with ctx.transaction() as conn:
                    some = range(first + at, first + min(at + 10, count))
                    good = [row for row in some if row % 10]
                    await conn.execute(
                        "insert into chaos.loaded select $1, $2, u from unnest($3::bigint[]) u",
                        ctx.tenant_id, ctx.job_id, good,
                    )  # fmt: skip
                    for row in some:
                        if row % 10 == 0:
                            ctx.row_error(row, "BAD", "the tenth")
                    ctx.advance(len(good))
                    at += len(some)
                    await ctx.save_checkpoint(at)
                await anyio.sleep(0.02)

    return relay


def listen_in(journal: Journal) -> None:
    """Have it noted where each claim begins to look, and which claims the database has said not to be current."""
    claim = RelayDispatchRepository.claim

    async def look(self: Any, *args: Any, **rest: Any) -> Any:
        if rest["after"] is not None:
            # Before it is sent, so that no claim above zero is taken for one from there.
            after = dict(zip(rest["tenants"], rest["after"], strict=True))
            await journal.note("cursor", "", rest["claim_id"], after=after)
        return await claim(self, *args, **rest)

    def told(verb: str, call: Callable[..., Awaitable[Sequence[Settled | WriteOutcome]]]) -> Any:
        async def ask(self: Any, relay_id: str, rows: Sequence[Any], *, claimed_by: str, **rest: Any) -> Any:
            answers = await call(self, relay_id, rows, claimed_by=claimed_by, **rest)
            for row, answer in zip(rows, answers, strict=True):
                if (answer.outcome if isinstance(answer, Settled) else answer) is WriteOutcome.STALE:
                    tenant, job_id, fence = _claim_of(row)
                    await journal.note("stale", tenant, job_id, fence=fence, instance=claimed_by, verb=verb)
            return answers

        return ask

    verbs: Any = RelayDispatchRepository
    verbs.claim = look
    for verb in ("complete_many", "retry", "release", "heartbeat"):
        setattr(verbs, verb, told(verb, getattr(verbs, verb)))


def _claim_of(row: Any) -> tuple[str, UUID, int]:
    return row[:3] if isinstance(row, tuple) else (row.tenant_id, row.job_id, row.fence)


async def main(name: str, journal_dsn: str) -> None:
    async with open_journal(journal_dsn, name) as journal:
        listen_in(journal)
        relays = [make(relay_id, tenants, journal) for relay_id, tenants in SERVES[name].items()]
        await run_relays(relays, install_signal_handlers=True)


if __name__ == "__main__":
    configure()
    try:
        anyio.run(main, sys.argv[1], sys.argv[2])
    except* DatabaseUnavailableError as group:
        # At the start, which is the supervisor's to repeat: see Relay.main.
        logging.getLogger("chaos").warning("not started: %s", group.exceptions)
        os._exit(NOT_REACHED)
