"""Break the product in small ways, one at a time, and look whether what is to tell of it does.

A mutant is one place of an SQL function or of a module of the SDKs, said in another way (the tables of tests/mutants).
The Hypothesis machine of its room has to turn red, or the test that the table names where no machine plays that.

    python -m tests.mutants                    all of them: some seconds each, half an hour in all
    python -m tests.mutants -k fence lease     those whose name, function or file has one of the words
    python -m tests.mutants --seed 7           other games than the suite's
    python -m tests.mutants --all              also those of which it is known that nothing can tell them
    python -m tests.mutants --list             try none; look whether their places are still there. Seconds, no server

First, all that is to tell plays with nothing changed, and must pass. Your tree and your databases are left alone:
functions are replaced in clones of a database on a server that is thrown away, files in copies of the sources; so
nothing is left behind where it is interrupted either.

Each line is a mutant: seconds, name, and the game or test that told; or LIVES, or GONE where the text that it would
change is not there any more, or BROKEN where it cannot be tried. The table at the end counts them.
Exit status: 0 every one was told, or is known for equivalent; 1 some were not; 2 nothing was tried; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import PurePath

from hypothesis import Phase, settings

from dispatch_core.dev.postgres import start_local_server
from tests.mutants import python_sdk, sql_dispatch, sql_durable, sql_outbox, sql_tenancy
from tests.mutants.mutant import Mutant
from tests.mutants.stand import ROOT, BrokenError, Stand

MUTANTS = [
    *sql_tenancy.MUTANTS,
    *sql_dispatch.MUTANTS,
    *sql_outbox.MUTANTS,
    *sql_durable.MUTANTS,
    *python_sdk.MUTANTS,
]
FAST = {"fsync": "off", "full_page_writes": "off"}
VERDICTS = ("told", "equivalent", "LIVES", "GONE", "BROKEN")
BAD = VERDICTS[2:]


class Table:
    """Verdicts: a line each as they come, and how many of each there were."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._bad: list[str] = []

    def add(self, mutant: Mutant, verdict: str, what: str, seconds: float = 0) -> None:
        print(f"{seconds:5.1f} s  {mutant.title:76} {what if verdict == 'told' else f'{verdict}: {what}'}", flush=True)
        file = PurePath(mutant.file)
        self._counts.setdefault(file.name if mutant.is_sql else str(file), Counter())[verdict] += 1
        if verdict in BAD:
            self._bad.append(f"{verdict}: {mutant.title} ({mutant.file})")

    def show(self) -> int:
        """Print the counts, by file, and again what is bad; return whether there is any, as the exit status."""
        print(f"\n{'':34}", *(f"{verdict:>10}" for verdict in VERDICTS))
        for name, counts in [*self._counts.items(), ("all", sum(self._counts.values(), Counter()))]:
            print(f"{name:34}", *(f"{counts[verdict]:10}" for verdict in VERDICTS))
        return self.show_bad()

    def show_bad(self) -> int:
        print("", *self._bad, sep="\n")
        return int(bool(self._bad))


def tried(mutant: Mutant, told: Callable[[Mutant], str]) -> tuple[str, str]:
    """Return the verdict, and what there is to say of it."""
    try:
        what = told(mutant)
    except LookupError as error:
        return "GONE", str(error.args[0])
    except BrokenError as error:
        return "BROKEN", str(error)
    if what:
        return "told", what + (f" (though: {mutant.equivalent})" if mutant.equivalent else "")
    return ("equivalent", mutant.equivalent) if mutant.equivalent else ("LIVES", "nothing told")


def listed(mutant: Mutant) -> str:
    """Return what is to tell of the mutant, whose place is still there. Raises: LookupError."""
    mutant.text(ROOT)
    path, _, name = mutant.test.partition("::")
    if path and not ((file := ROOT / "tests" / path).is_file() and f"def {name}(" in file.read_text()):
        raise LookupError(f"there is no test {mutant.test}")
    return "" if mutant.equivalent else mutant.test or "the machine"


def main() -> int:
    """Try them; print a line each, and a table at the end."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", nargs="+", default=[""], help="those whose name, function or file has one of these in it")
    parser.add_argument("--seed", type=int, default=1, help="of the games (1, as in the suite)")
    parser.add_argument("--all", action="store_true", help="also those that are known to be equivalent")
    parser.add_argument("--list", action="store_true", help="try none; look whether their places are still there")
    options = parser.parse_args()
    mutants = [
        mutant
        for mutant in MUTANTS
        if any(word in f"{mutant.file} {mutant.title}" for word in options.k)
        and (options.all or options.list or not mutant.equivalent)
    ]
    if not mutants:
        print("there is no such mutant", file=sys.stderr)
        return 2
    table = Table()
    if options.list:
        for mutant in mutants:
            table.add(mutant, *tried(mutant, listed))
        return table.show_bad()
    # Whoever ends it in another way than by Ctrl-C: the server is to go all the same.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return try_all(mutants, options.seed, table)
    except KeyboardInterrupt:
        table.show()
        print("interrupted", file=sys.stderr)
        return 130


def try_all(mutants: list[Mutant], seed: int, table: Table) -> int:
    """Try them on a server of their own; return the exit status."""
    # No shrinking: the number of games is that of the first failure.
    settings.register_profile("first-failure", phases=[Phase.generate])
    settings.load_profile("first-failure")
    # Tests that are cut short leave tasks behind, of which nobody need know.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    with start_local_server(settings=FAST, ephemeral=True, in_memory=True) as server, asyncio.Runner() as runner:
        stand = Stand(runner, server, seed)
        began = time.monotonic()
        try:
            failed = stand.told_of_nothing(mutants)
        except BrokenError as error:
            failed = str(error)
        if failed:
            print(f"with nothing changed: {failed}; so nothing was tried", file=sys.stderr)
            return 2
        print(f"{time.monotonic() - began:5.1f} s  with nothing changed all pass; mutants: {len(mutants)}", flush=True)
        for mutant in mutants:
            began = time.monotonic()
            verdict = tried(mutant, stand.told)
            table.add(mutant, *verdict, time.monotonic() - began)
    return table.show()


if __name__ == "__main__":
    sys.exit(main())
