"""`relay-dispatch outbox retry | park | purge`: decide about events that were, or are to be, given up."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Annotated, Final
from uuid import UUID

import typer

from dispatch_core.cli.common import NOTHING_MATCHED, Output, OutputOption, emit_json, note, run_async
from dispatch_core.outbox_repository import OutboxRepository
from gateway_sdk.cli_text import waiting
from gateway_sdk.cli_words import amount, ask, must_be_answerable, parse_age, progress, span
from gateway_sdk.outbox_cli.common import (
    COUNTED,
    DsnOption,
    JsonOption,
    KeyOption,
    KindOption,
    Row,
    TenantsOption,
    count_events,
    format_of,
    locate,
    outbox_dsn,
    tenants_of,
    verbs_at,
)

__all__ = ["park", "purge", "retry"]

BATCH: Final = 1000
"""Events retried or removed in one transaction."""

AgeOption = Annotated[
    timedelta | None,
    typer.Option("--older-than", metavar="AGE", parser=parse_age, help="Parked at least so long ago: 15m, 12h, 7d."),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def retry(
    event_ids: Annotated[list[UUID] | None, typer.Argument(metavar="EVENT_ID")] = None,
    tenant: TenantsOption = None,
    kind: KindOption = None,
    key: KeyOption = None,
    older_than: AgeOption = None,
    all_: Annotated[bool, typer.Option("--all", help="All parked events (of the tenants named); asks first.")] = False,
    yes: YesOption = False,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have events delivered again: by their ids, or parked ones by kind, key or --all.

    A parked event begins anew, with no attempts; one named by its id that is
    delayed or backing off is due at once. By kind, key or --all the oldest come
    first, a thousand in a transaction; what is parked meanwhile is left alone.

    An event that was delivered before may be delivered twice by that. The
    dispatch sink makes no second job of it, unless it is delivered later than
    GATEWAY_RESULT_KEEP_SECONDS after its first job ended; other sinks must
    tell by its id.

    Exit code 0 where one was retried, 3 where none was.

    Examples:
      relay-dispatch outbox retry 01998d4e-… 01998d4f-…
      relay-dispatch outbox retry --kind order.placed --tenant acme
      relay-dispatch outbox retry --all --yes
    """
    by_choice = kind is not None or key is not None or all_
    if bool(event_ids) == by_choice or (event_ids and older_than is not None):
        raise typer.BadParameter("give ids, or else --kind, --key or --all")
    if event_ids:
        found = run_async(_each, outbox_dsn(dsn), tenant, event_ids, lambda verbs: verbs.retry)
        _report_each(found, "retried", format_of(output, json), {})
        return
    if all_:
        must_be_answerable(yes=yes)
    choice = {"kind": kind, "key": key}
    age = older_than or timedelta(0)
    names, matched = _matching(dsn, tenant, choice, age)
    if all_:
        ask(f"Have {amount(matched, 'parked event', most=COUNTED)} delivered again?", yes=yes)
    done = run_async(_in_batches, outbox_dsn(dsn), names, "retrying", matched, age, partial(_retry_parked, choice))
    _report_all(done, "retried", matched, format_of(output, json))


def park(
    event_ids: Annotated[list[UUID], typer.Argument(metavar="EVENT_ID")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is shown as the last error.")],
    tenant: TenantsOption = None,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Give events up: they are kept, and not delivered until a person retries them.

    The next event of a parked one's key has its turn then. One that is claimed
    may be on its way, and be delivered all the same.

    Exit code 0 where one was parked, 3 where none was.

    Example:
      relay-dispatch outbox park 01998d4e-… --reason 'order 7 was cancelled'
    """
    if not reason.strip():
        raise typer.BadParameter("--reason must say something")
    found = run_async(_each, outbox_dsn(dsn), tenant, event_ids, lambda verbs: partial(_park, verbs, reason))
    _report_each(found, "parked", format_of(output, json), {"claimed": "; it was claimed and may be delivered yet"})


def purge(
    older_than: Annotated[
        timedelta, typer.Option("--older-than", metavar="AGE", parser=parse_age, help="Parked so long ago: 12h, 7d.")
    ],
    tenant: TenantsOption = None,
    kind: KindOption = None,
    key: KeyOption = None,
    yes: YesOption = False,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Remove parked events for good; no others.

    They are counted first, and it asks; without a terminal it needs --yes. A
    thousand are removed in a transaction, the oldest first; stopped, it has
    removed what it has removed.

    Exit code 0 where one was removed, 1 where the answer was no, 3 where
    there was none.

    Examples:
      relay-dispatch outbox list --state parked --older-than 30d
      relay-dispatch outbox purge --older-than 30d --kind order.placed
      relay-dispatch outbox purge --older-than 30d --yes
    """
    must_be_answerable(yes=yes)
    choice = {"kind": kind, "key": key}
    names, matched = _matching(dsn, tenant, choice, older_than)
    of = f" of {amount(len(names), 'tenant')}" if len(names) > 1 else f" of tenant {names[0]}"
    since = f", parked for more than {span(older_than)}," if older_than else ""
    ask(f"Remove {amount(matched, 'parked event', most=COUNTED)}{of}{since} for good?", yes=yes)
    done = run_async(_in_batches, outbox_dsn(dsn), names, "purging", matched, older_than, partial(_purge, choice))
    _report_all(done, "purged", matched, format_of(output, json))


# --- events by their ids ----------------------------------------------------------------------------------------------


async def _each(
    dsn: str,
    tenants: Sequence[str] | None,
    event_ids: Sequence[UUID],
    verb_of: Callable[[OutboxRepository], Callable[[str, list[UUID]], Awaitable[set[UUID]]]],
) -> list[Row]:
    """Do it with each event, in the tenant that has it; return how it stood before, and whether it was done."""
    wanted = list(dict.fromkeys(event_ids))
    async with verbs_at(dsn) as verbs:
        located = await locate(verbs, tenants, wanted)
        done: set[UUID] = set()
        for tenant in dict.fromkeys(tenant for tenant, _ in located.values()):
            done |= await verb_of(verbs)(tenant, [event_id for event_id in located if located[event_id][0] == tenant])
    return [
        {"event_id": event_id, "tenant": tenant, "was": state, "done": event_id in done}
        for event_id in wanted
        for tenant, state in [located.get(event_id, (None, None))]
    ]


async def _park(verbs: OutboxRepository, reason: str, tenant: str, event_ids: list[UUID]) -> set[UUID]:
    return await verbs.park(tenant, event_ids, reason)


def _report_each(found: Sequence[Row], word: str, output: Output, also: dict[str, str]) -> None:
    if output is Output.JSON:
        emit_json([{"event_id": r["event_id"], "tenant": r["tenant"], "was": r["was"], word: r["done"]} for r in found])
    else:
        for row in found:
            if row["done"]:
                note(f"{row['event_id']}: {word}{also.get(row['was'], '')}")
            elif row["was"] is None:
                note(f"{row['event_id']}: not there, or of a tenant that this login may not see")
            else:
                note(f"{row['event_id']}: left as it is, {row['was']}")
    if not any(row["done"] for row in found):
        raise typer.Exit(NOTHING_MATCHED)


# --- parked events by what they have in common ------------------------------------------------------------------------


def _matching(dsn: str | None, tenants: Sequence[str] | None, choice: Row, age: timedelta) -> tuple[list[str], int]:
    """Return the tenants that have such parked events, and how many there are."""
    counts = run_async(_parked, outbox_dsn(dsn), tenants, choice, age)
    if not counts:
        note("no such parked event")
        raise typer.Exit(NOTHING_MATCHED)
    return list(counts), sum(counts.values())


async def _parked(dsn: str, tenants: Sequence[str] | None, choice: Row, age: timedelta) -> dict[str, int]:
    async with verbs_at(dsn) as verbs:
        with waiting("counting"):
            names = await tenants_of(verbs, tenants)
            counts = {
                name: await count_events(verbs, [name], state="parked", older_than=age, **choice) for name in names
            }
    return {name: count for name, count in counts.items() if count}


async def _retry_parked(choice: Row, verbs: OutboxRepository, tenant: str, age: timedelta) -> int:
    return await verbs.retry_parked(tenant, age, limit=BATCH, **choice)


async def _purge(choice: Row, verbs: OutboxRepository, tenant: str, age: timedelta) -> int:
    return await verbs.purge(tenant, age, limit=BATCH, **choice)


async def _in_batches(
    dsn: str,
    tenants: Sequence[str],
    text: str,
    matched: int,
    age: timedelta,
    batch: Callable[[OutboxRepository, str, timedelta], Awaitable[int]],
) -> dict[str, int]:
    """Go through the tenants batch by batch; return how many events it was in each."""
    done = dict.fromkeys(tenants, 0)
    started = time.monotonic()
    try:
        async with verbs_at(dsn) as verbs:
            with progress(text, matched) as tell:
                for tenant in tenants:
                    count = BATCH
                    while count == BATCH:
                        # What is parked while this runs is not among those that were asked for.
                        age_now = age + timedelta(seconds=time.monotonic() - started)
                        count = await batch(verbs, tenant, age_now)
                        done[tenant] += count
                        tell(sum(done.values()))
    except BaseException:
        if any(done.values()):
            note(f"{text} stopped after {amount(sum(done.values()))}")
        raise
    return done


def _report_all(done: dict[str, int], word: str, matched: int, output: Output) -> None:
    count = sum(done.values())
    if output is Output.JSON:
        emit_json({word: count, "matched": matched, "tenants": done})
    else:
        others = "; the others are no longer parked, or in somebody else's hands"
        less = f" of {matched:,}{others}" if count < matched < COUNTED else ""
        note(f"{amount(count)} {word}{less}")
    if not count:
        raise typer.Exit(NOTHING_MATCHED)
