"""A relay process of the run: `python -m tests.chaos.relay NAME JOURNAL-DSN CLOCK-FILE`, the rest by environment."""

from __future__ import annotations

import sys

from tests.chaos import clock

if __name__ == "__main__":
    clock.install(sys.argv[3])

import json
import logging
import os

import anyio

from dispatch_core.errors import DatabaseUnavailableError
from relay_sdk import ChunkContext, DispatchJob, Reject, Relay, Reply, Retry, Snooze, run_relays
from tests.chaos.journal import Journal, open_journal
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

    def answer(job: DispatchJob) -> Reply:
        # So that the audit sees whose answer was taken.
        return Reply(f"{job.tenant_id} {job.job_id} {job.attempt} {job.fence} {relay.instance_id}")

    @relay.handler("Work")
    async def work(job: DispatchJob) -> Reply:
        await note("began", job)
        said = json.loads(job.body)
        await anyio.sleep(said["seconds"])
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


async def main(name: str, journal_dsn: str) -> None:
    async with open_journal(journal_dsn, name) as journal:
        relays = [make(relay_id, tenants, journal) for relay_id, tenants in SERVES[name].items()]
        await run_relays(relays, install_signal_handlers=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    try:
        anyio.run(main, sys.argv[1], sys.argv[2])
    except* DatabaseUnavailableError as group:
        # At the start, which is the supervisor's to repeat: see Relay.main.
        logging.getLogger("chaos").warning("not started: %s", group.exceptions)
        os._exit(NOT_REACHED)
