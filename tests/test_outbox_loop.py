"""The drainer's loop by itself, before an outbox that fails when it is told to."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from dispatch_core.errors import DatabaseUnavailableError
from dispatch_core.outbox_models import Batch
from gateway_sdk.outbox_loop import DrainLoop


async def test_a_claim_that_fails_just_when_the_database_is_back_is_made_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dispatch_core.backoff.full_jitter", lambda *_: 3600.0)

    class Away:
        knows_more = False

        def __init__(self) -> None:
            self.claims = 0
            self.again = anyio.Event()

        async def claim(self, *_: object, **__: object) -> Batch:
            self.claims += 1
            if self.claims == 1:
                loop.database_is_back()
                raise DatabaseUnavailableError("away")
            self.again.set()
            await anyio.sleep_forever()
            raise AssertionError

    outbox: Any = Away()
    loop = DrainLoop(outbox, batch=1, interval=3600)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(loop.run, lambda: None)
            await outbox.again.wait()
            group.cancel_scope.cancel()
