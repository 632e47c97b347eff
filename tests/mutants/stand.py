"""Where mutants are tried: one server, thrown away at the end, and databases and copies of the sources on it.

Nothing outside of them is ever changed. A mutant of a function is put in a clone of the migrated database. The machine
of its room plays there in this process; or pytest runs the test that is named, in this process too, whose databases
are clones of that clone. A mutant of Python, or one that a test is to read, is put in a copy of the sources, and pytest
runs there.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from dispatch_core.dev.postgres import DSN_VARIABLE, DevServer
from tests import conftest, test_dispatch_machine, test_durable_machine, test_sdk_machine
from tests.mutants.mutant import Mutant
from tests.support.databases import TestDatabase, make_template, new_database

ROOT = Path(__file__).parents[2]
COPIED = ("dispatch_core", "gateway_sdk", "relay_sdk", "migrations", "tests", "pyproject.toml")

Test = Callable[[TestDatabase, bool, int], None]
Machine = tuple[Any, Test]
DISPATCH: Machine = (
    test_dispatch_machine,
    test_dispatch_machine.test_gateways_holders_and_sweeps_in_any_order_do_what_the_model_says,
)
DURABLE: Machine = (
    test_durable_machine,
    test_durable_machine.test_holders_people_and_a_reaper_in_any_order_do_what_the_model_says,
)
SDK = Path(test_sdk_machine.__file__).relative_to(ROOT)
READERS = (
    "tests/test_sql_predicates.py",
    "tests/test_tenancy_channels.py::test_another_installation_has_other_names",
)
"""Tests that read the functions' files, or migrate by them."""
PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "--timeout=60")
"""A test that waits for ever tells too."""


class BrokenError(Exception):
    """What was to tell could not be run: that is no verdict."""


class Stand:
    """One server and one template, for all of them."""

    def __init__(self, runner: asyncio.Runner, server: DevServer, seed: int) -> None:
        self._runner = runner
        self._server = server
        self._seed = seed
        self._template = runner.run(make_template(server))

    def told(self, mutant: Mutant) -> str:
        """Return what told of the mutant; '' where nothing did.

        Raises: LookupError where its place is not there any more, BrokenError where it cannot be tried.
        """
        text = mutant.text(ROOT)
        if _needs_a_copy(mutant):
            return self._on_a_copy([_test(mutant)], {mutant.file: text})
        with self._database() as database:
            try:
                self._runner.run(_execute(database.admin_dsn, text))
            except asyncpg.PostgresError as error:
                raise BrokenError(f"it is no SQL: {error}") from error
            machine = _machine(mutant)
            return self._run_on([_test(mutant)], database) if machine is None else self._played(machine, database)

    def told_of_nothing(self, mutants: Iterable[Mutant]) -> str:
        """Return what fails of all that is to tell these mutants though nothing is changed; '' = it is worth trying."""
        machines: list[Machine] = []
        here: dict[str, None] = {}
        copied: dict[str, None] = {}
        for mutant in mutants:
            machine = _machine(mutant)
            if machine is None:
                (copied if _needs_a_copy(mutant) else here)[_test(mutant)] = None
            elif machine not in machines:
                machines.append(machine)
        with self._database() as database:
            told = self._run_on(list(here), database) if here else ""
        for machine in machines:
            with self._database() as database:
                told = told or self._played(machine, database)
        return told or (self._on_a_copy(list(copied), {}) if copied else "")

    @contextlib.contextmanager
    def _database(self) -> Iterator[TestDatabase]:
        context = new_database(self._server, self._template)
        database = self._runner.run(context.__aenter__())
        try:
            yield database
        finally:
            self._runner.run(context.__aexit__(None, None, None))

    def _played(self, machine: Machine, database: TestDatabase) -> str:
        module, test = machine
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                test(database, False, self._seed)
        except Exception as error:  # noqa: BLE001  that is what is hoped for
            games = int(module.Game.stage.games)
            return _game_in_short(games, "".join(traceback.format_exception(error)))
        return ""

    def _run_on(self, tests: list[str], template: TestDatabase) -> str:
        """Let pytest run tests here, on clones of that database."""

        async def make_template(*_: object, **__: object) -> str:
            return template.name

        told = _Told()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
            patch.setenv(DSN_VARIABLE, self._server.admin_dsn)
            patch.setattr(conftest, "make_template", make_template)
            # Nobody is in it, or it could not be cloned; and it is dropped by whoever has made it.
            patch.setattr(conftest, "drop_database", _leave)
            options = [*PYTEST, "--capture=sys", f"--seed={self._seed}", "-c", str(ROOT / "pyproject.toml")]
            status = pytest.main([*options, *(str(ROOT / test) for test in tests)], plugins=[told])
        if status == pytest.ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise BrokenError(f"pytest ended with {int(status)}, for {tests}")
        return told.first

    def _on_a_copy(self, tests: list[str], changed: dict[str, str]) -> str:
        with tempfile.TemporaryDirectory(prefix="mutant-") as name:
            for part in COPIED:
                if (ROOT / part).is_dir():
                    shutil.copytree(ROOT / part, Path(name) / part, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / part, Path(name) / part)
            for file, text in changed.items():
                (Path(name) / file).write_text(text)
            # Who waits in vain is not waited for: of a mutant that is told, that is the rule.
            copy = Path(name) / SDK
            copy.write_text(copy.read_text().replace("PATIENCE = 90.0", "PATIENCE = 15.0"))
            command = ["-m", "pytest", *PYTEST, f"--seed={self._seed}", *tests]
            done = subprocess.run(
                [sys.executable, *command], cwd=name, capture_output=True, text=True, check=False,
                env={**os.environ, "PYTHONPATH": name, "COLUMNS": "500", DSN_VARIABLE: self._server.admin_dsn},
            )  # fmt: skip
        out = done.stdout + done.stderr
        if done.returncode > 1:
            raise BrokenError(f"pytest ended with {done.returncode}: {_error(out)}")
        if done.returncode == 0:
            return ""
        games = re.search(r"^games: (\d+)$", done.stdout, re.MULTILINE)
        return _test_in_short(out) if games is None else _game_in_short(int(games[1]), out)


class _Told:
    """A plugin of pytest that keeps the first failure."""

    def __init__(self) -> None:
        self.first = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.first:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(report.longrepr if crash is None else crash.message).split("\n", 1)[0]
            self.first = f"{report.nodeid.rpartition('/')[2]}: {why[:70]}"


async def _leave(*_: object) -> None:
    pass


def _needs_a_copy(mutant: Mutant) -> bool:
    return not mutant.is_sql or _test(mutant).startswith(READERS)


def _machine(mutant: Mutant) -> Machine | None:
    if mutant.test or not mutant.is_sql:
        return None
    return DURABLE if "_durable_" in mutant.file else DISPATCH


def _test(mutant: Mutant) -> str:
    return f"tests/{mutant.test}" if mutant.test else str(SDK)


async def _execute(dsn: str, text: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(text)
    finally:
        await connection.close()


def _game_in_short(games: int, out: str) -> str:
    """Return the game (the failed one is played twice, to be shown), its last step and the error."""
    steps = [name for name in re.findall(r"\bstate\.(\w+)\(", out) if name != "teardown"]
    return f"game {max(1, games - 1):2}, {steps[-1] if steps else '?'}: {_error(out)}"


def _test_in_short(out: str) -> str:
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - (.*))?$", out, re.MULTILINE)
    return "?" if failed is None else f"{failed[1]}: {(failed[2] or '?')[:70]}"


def _error(out: str) -> str:
    errors = re.findall(r"^(?:E\s+)?(?:\w+\.)*(\w*(?:Error|Fault|Failure|Violation\w*)\b:? ?.*)$", out, re.MULTILINE)
    return errors[0][:70] if errors else "?"
