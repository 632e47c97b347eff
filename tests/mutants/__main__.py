"""Break the product in small ways, one at a time, and look which rule of which machine tells, in how many games.

    python -m tests.mutants                    all of them, some seconds each
    python -m tests.mutants -k fence lease     those whose name, function or file has one of the words
    python -m tests.mutants --seed 7           other games than the suite's
    python -m tests.mutants --all              also those of which it is known that nothing can tell them

Functions are replaced in a clone of the migrated database, and the machine plays in this process; for Python it plays
in another one, on a copy of the sources. It stops at its first failure. The last line counts those that live and are
not known for equivalent, and those whose text is not there any more: of any it ends with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
from hypothesis import Phase, settings

from dispatch_core.dev.postgres import DSN_VARIABLE, DevServer, start_local_server
from tests import test_dispatch_machine, test_durable_machine, test_sdk_machine
from tests.mutants import python_sdk, sql_dispatch, sql_durable
from tests.mutants.mutant import Mutant
from tests.support.databases import TestDatabase, make_template, new_database

ROOT = Path(__file__).parents[2]
FAST = {"fsync": "off", "full_page_writes": "off"}
COPIED = ("dispatch_core", "gateway_sdk", "relay_sdk", "migrations", "tests", "pyproject.toml")

Test = Callable[[TestDatabase, bool, int], None]
DISPATCH: tuple[Any, Test] = (
    test_dispatch_machine,
    test_dispatch_machine.test_gateways_holders_and_sweeps_in_any_order_do_what_the_model_says,
)
DURABLE: tuple[Any, Test] = (
    test_durable_machine,
    test_durable_machine.test_holders_people_and_a_reaper_in_any_order_do_what_the_model_says,
)
SDK: tuple[Any, Test] = (
    test_sdk_machine,
    test_sdk_machine.test_gateways_and_relays_do_what_the_model_allows_whatever_their_handlers_do,
)


class Stand:
    """One server and one template, for all of them."""

    def __init__(self, runner: asyncio.Runner, server: DevServer, seed: int) -> None:
        self._runner = runner
        self._server = server
        self._seed = seed
        self._template = runner.run(make_template(server))

    def told(self, mutant: Mutant) -> str:
        """Return what told of the mutant, in which game; '' where nothing did."""
        if mutant.file.endswith(".sql"):
            with self._database() as database:
                self._runner.run(_execute(database.admin_dsn, mutant.text(ROOT)))
                return self._played(DURABLE if "_durable_" in mutant.file else DISPATCH, database)
        return self._played_on_a_copy(SDK, mutant)

    @contextlib.contextmanager
    def _database(self) -> Iterator[TestDatabase]:
        context = new_database(self._server, self._template)
        database = self._runner.run(context.__aenter__())
        try:
            yield database
        finally:
            self._runner.run(context.__aexit__(None, None, None))

    def _played(self, machine: tuple[Any, Test], database: TestDatabase) -> str:
        module, test = machine
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                test(database, False, self._seed)
        except Exception as error:  # noqa: BLE001  that is what is hoped for
            games = int(module.Game.stage.games)
            return _in_short(games, "".join(traceback.format_exception(error)))
        return ""

    def _played_on_a_copy(self, machine: tuple[Any, Test], mutant: Mutant) -> str:
        module, _ = machine
        with tempfile.TemporaryDirectory(prefix="mutant-") as name:
            for part in COPIED:
                if (ROOT / part).is_dir():
                    shutil.copytree(ROOT / part, Path(name) / part, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / part, Path(name) / part)
            (Path(name) / mutant.file).write_text(mutant.text(ROOT))
            path = Path(module.__file__).relative_to(ROOT)
            copy = Path(name) / path
            copy.write_text(copy.read_text().replace("PATIENCE = 90.0", "PATIENCE = 15.0"))
            command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path), f"--seed={self._seed}"]
            done = subprocess.run(
                [sys.executable, *command], cwd=name, capture_output=True, text=True, check=False,
                env={**os.environ, "PYTHONPATH": name, DSN_VARIABLE: self._server.admin_dsn},
            )  # fmt: skip
        if done.returncode == 0:
            return ""
        games = re.search(r"^games: (\d+)$", done.stdout, re.MULTILINE)
        return _in_short(0 if games is None else int(games[1]), done.stdout + done.stderr)


async def _execute(dsn: str, text: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(text)
    finally:
        await connection.close()


def _in_short(games: int, out: str) -> str:
    """Return the game (the failed one is played twice, to be shown), its last step and the error."""
    steps = [name for name in re.findall(r"\bstate\.(\w+)\(", out) if name != "teardown"]
    errors = re.findall(r"^(?:E\s+)?(?:\w+\.)*(\w*(?:Error|Fault|Failure|Violation\w*)\b:? ?.*)$", out, re.MULTILINE)
    return f"game {max(1, games - 1):2}, {steps[-1] if steps else '?'}: {errors[-1][:70] if errors else '?'}"


def main() -> int:
    """Try them all; print one line each."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-k", nargs="*", default=[""], help="those whose name, function or file has one of these in it")
    parser.add_argument("--seed", type=int, default=1, help="of the games")
    parser.add_argument("--all", action="store_true", help="also those that are known to be equivalent")
    options = parser.parse_args()
    # No shrinking: the number of games is that of the first failure.
    settings.register_profile("first-failure", phases=[Phase.generate])
    settings.load_profile("first-failure")
    alive = 0
    with start_local_server(settings=FAST, ephemeral=True, in_memory=True) as server, asyncio.Runner() as runner:
        stand = Stand(runner, server, options.seed)
        for mutant in [*sql_dispatch.MUTANTS, *sql_durable.MUTANTS, *python_sdk.MUTANTS]:
            text = f"{mutant.file} {mutant.function} {mutant.name}"
            if any(word in text for word in options.k) and (options.all or not mutant.equivalent):
                began = time.monotonic()
                try:
                    told = stand.told(mutant)
                except LookupError as error:
                    told, is_caught = str(error), False
                else:
                    is_caught = bool(told)
                alive += not is_caught and not mutant.equivalent
                verdict = told or (f"lives: {mutant.equivalent}" if mutant.equivalent else "LIVES")
                name = f"{mutant.function}: {mutant.name}"
                print(f"{time.monotonic() - began:5.1f} s  {name:68} {verdict}", flush=True)
    print(f"{alive} live")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
