"""For games of Hypothesis against a model: the stage that all games of a test share, and how they are played."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import AsyncExitStack
from typing import Any, Generic, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as from_seed
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.support.databases import TestDatabase
from tests.support.protocol import Connection, connected

T = TypeVar("T")


class GameStage:
    """One database, and what is open on it, for all games of a test; each game has tenants or jobs of its own."""

    def __init__(self, runner: asyncio.Runner, database: TestDatabase) -> None:
        self._runner = runner
        self._stack = AsyncExitStack()
        self._database = database
        self.games = 0
        self.seen: Counter[str] = Counter()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)

    async def connect(self, dsn: str, **options: str) -> Connection:
        """Open a connection that ends with the stage."""
        # Nothing here may wait for a lock: the model knows of none.
        options = {"statement_timeout": "3s", **options}
        return await self._stack.enter_async_context(connected(dsn, server_settings=options))

    async def open(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        await self._stack.aclose()


S = TypeVar("S", bound=GameStage)


class StagedGame(RuleBasedStateMachine, Generic[S]):
    """A game on a stage of its class."""

    stage: S

    def __init__(self) -> None:
        super().__init__()
        self.stage.games += 1

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.stage.run(call)

    def saw(self, verb: str, outcome: object) -> None:
        """Note what came of a verb, so that a test which plays nothing of worth is seen to be one."""
        self.stage.seen[f"{verb}: {outcome}"] += 1


def play(
    game: type[StagedGame[S]],
    stage: Callable[[asyncio.Runner], S],
    seed: int,
    *,
    games: int,
    steps: int,
    common: Iterable[str] = (),
    phases: Collection[Phase] | None = None,
) -> None:
    """Play so many games of so many steps; a failure prints its shortest game (if `phases` has its making).

    Prints how many games there were, and how often what came up. `common` has to.
    """
    with asyncio.Runner() as runner:
        game.stage = stage(runner)
        game.stage.run(game.stage.open())
        try:
            run_state_machine_as_test(
                from_seed(seed)(game),
                settings=settings(
                    max_examples=games,
                    stateful_step_count=steps,
                    deadline=None,
                    database=None,
                    print_blob=True,
                    report_multiple_bugs=False,
                    suppress_health_check=list(HealthCheck),
                    phases=settings().phases if phases is None else phases,
                ),
            )
        finally:
            game.stage.run(game.stage.close())
            print(f"games: {game.stage.games}")
    seen = game.stage.seen
    for what, times in sorted(seen.items()):
        print(f"{times:6} {what}")
    missing = [what for what in common if seen[what] == 0]
    assert missing == [], "games in which this never happens show little"
