"""Claims whose reply is lost: what they took is given back, and what can never arrive hurts itself alone (D53)."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch_core.errors import DatabaseUnavailableError
from dispatch_core.outbox import Outbox
from tests.support.databases import TestDatabase
from tests.support.outbox import Recorder, outbox, write
from tests.support.protocol import TENANT, Connection


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


class _Verbs:
    """The verbs of a drainer, with some replaced."""

    def __init__(self, verbs: Any, replaced: dict[str, Any]) -> None:
        self._verbs = verbs
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._verbs, name)


def _replace(drainer: Outbox, **verbs: Any) -> None:
    drainer._verbs = _Verbs(drainer._verbs, verbs)  # type: ignore[assignment]
