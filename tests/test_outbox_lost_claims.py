"""Claims whose reply is lost: what they took is given back, and what can never arrive hurts itself alone (D53)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from dispatch_core.errors import ConnectionLostError, DatabaseUnavailableError
from dispatch_core.outbox import Outbox
from dispatch_core.outbox_models import ClaimedEvents
from tests.support.databases import TestDatabase
from tests.support.outbox import Recorder, make_stale, outbox, states, write
from tests.support.protocol import OUTBOX, TENANT, Connection


async def test_a_release_that_fails_is_asked_for_until_its_claim_is_stale_and_not_for_ever(
    database: TestDatabase, gateway: Connection
) -> None:
    await write(gateway, 1)
    async with outbox(database, Recorder()) as drainer:

        async def fail(*_: Any) -> int:
            raise DatabaseUnavailableError("away")

        _replace(drainer, unclaim=fail)
        drainer._unanswered["not stale"] = ([TENANT], float("inf"))
        for _ in range(2):
            with pytest.raises(DatabaseUnavailableError):
                await drainer.drain()
        drainer._unanswered = {"stale": ([TENANT], 0.0)}
        with pytest.raises(DatabaseUnavailableError):
            await drainer.drain()
        assert (await drainer.drain()).delivered == 1


@pytest.mark.parametrize("batch", [100, 1])
async def test_an_event_whose_reply_can_never_arrive_fails_alone_and_is_counted(
    database: TestDatabase, gateway: Connection, admin: Connection, batch: int
) -> None:
    """As where its payload takes longer than a statement may: each claim of it is made, and its reply lost."""
    await write(gateway, *range(5), "never", *range(5), tenant="a")
    await write(gateway, *range(5), tenant="b")
    sink = Recorder()
    lost = 0
    async with outbox(database, sink, max_attempts=2) as drainer:
        claim = drainer.verbs.claim

        async def lose(*args: Any, **options: Any) -> ClaimedEvents:
            nonlocal lost
            claimed = await claim(*args, **options)
            if any(event.payload == "never" for event in claimed.events):
                lost += 1
                raise ConnectionLostError("cut")
            return claimed

        _replace(drainer, claim=lose)

        async def drain() -> None:
            for _ in range(40):
                with suppress(ConnectionLostError):
                    await drainer.drain(batch)

        await drain()
        assert len(sink.events) == 15
        assert {event.attempts for event in sink.events} == {0}
        assert lost == 2
        for attempt, state in ((1, "claimed"), (2, "parked")):
            assert await states(admin, "a") == {"never": "claimed"}
            await make_stale(admin)
            drainer.search_again()
            await drain()
            assert await states(admin, "a") == {"never": state}
            assert await admin.fetchval(f"select attempts from {OUTBOX}") == attempt
    assert lost == 3


class _Verbs:
    """The verbs of a drainer, with some replaced."""

    def __init__(self, verbs: Any, replaced: dict[str, Any]) -> None:
        self._verbs = verbs
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._verbs, name)


def _replace(drainer: Outbox, **verbs: Any) -> None:
    drainer._verbs = _Verbs(drainer._verbs, verbs)  # type: ignore[assignment]
