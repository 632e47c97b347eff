"""What the README and the pages it leads to say is true: its example runs, its table names tests that exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import anyio
import pytest

from dispatch_core import errors
from tests.support.cli import environment
from tests.support.databases import TestDatabase

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {
    room: (ROOT / "docs" / page).read_text()
    for room, page in (("I", "guarantees.md"), ("O", "outbox.md"), ("J", "durable.md"))
}
"""Where the promises stand with their tests: those of the outbox and of durable jobs in tables, the others in parts."""
MARKER = "<!-- example: tests/test_readme.py runs this block -->"

INVARIANTS = [*(f"I{n}" for n in range(1, 11)), *(f"O{n}" for n in range(1, 5)), *(f"J{n}" for n in range(1, 8))]
TEST_ID = re.compile(r"tests/(?:\w+/)?\w+\.py::\w+")


def example() -> str:
    """Return the Python block that follows the marker."""
    found = re.search(re.escape(MARKER) + r"\s*```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def guarantees() -> dict[str, list[str]]:
    """Return the tests that the pages of promises name, by invariant."""
    parts = re.split(r"^## (I\d+)$", PAGES["I"], flags=re.MULTILINE)
    found = {name: TEST_ID.findall(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}
    for room in ("O", "J"):
        rows = re.findall(rf"^\| ({room}\d+) \|.*\|([^|]*)\|$", PAGES[room], re.MULTILINE)
        found.update((name, TEST_ID.findall(cell)) for name, cell in rows)
    return found


@cache
def marks_of(path: Path) -> dict[str, str]:
    """Return the tests of a file with their source, decorators included, below what marks the whole file."""
    text = path.read_text()
    tree = ast.parse(text)
    everywhere = "".join(
        ast.get_source_segment(text, node) or ""
        for node in tree.body
        if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    )
    return {
        node.name: "\n".join(
            [everywhere, *(ast.unparse(mark) for mark in node.decorator_list), ast.get_docstring(node) or ""]
        )
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


async def test_the_example_of_the_readme_runs_as_it_stands(database: TestDatabase, tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(example())
    variables = environment(RELAY_DISPATCH_DSN=database.gateway_dsn, RELAY_WORKER_DSN=database.worker_dsn)
    with anyio.fail_after(60):
        done = await anyio.run_process(
            [sys.executable, str(script)], env=variables, stdin=subprocess.DEVNULL, check=False
        )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert done.stdout.decode() == "succeeded {'invoice': 7, 'total': 4200}\n"


def test_the_example_of_the_readme_is_as_short_as_it_says() -> None:
    lines = [line for line in example().splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) <= 20


def test_every_invariant_has_its_part_of_the_page_of_its_room() -> None:
    assert list(guarantees()) == INVARIANTS


def test_the_promises_of_the_readme_are_those_of_the_page_of_guarantees_in_the_same_words() -> None:
    rows = re.findall(r"^\| (I\d+) \| (.*?) \| (.*?) \|$", README, re.MULTILINE)
    parts = re.findall(r"^## (I\d+)\n\n(.*?)\. By: (.*?)\.$", PAGES["I"], re.MULTILINE)
    assert [(name, promise[0].upper() + promise[1:], by) for name, promise, by in rows] == parts
    assert [name for name, *_ in rows] == [name for name in INVARIANTS if name.startswith("I")]


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_the_tests_that_are_named_for_a_promise_exist_and_carry_its_id(invariant: str) -> None:
    named = guarantees()[invariant]
    assert named, f"{invariant} names no test"
    for test_id in named:
        file, name = test_id.split("::")
        tests = marks_of(ROOT / file)
        assert name in tests, f"{test_id} does not exist"
        assert re.search(rf"\b{invariant}\b", tests[name]), f"{test_id} does not say {invariant}"


PROSE = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks" / "README.md"])


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings, as links have them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PROSE])
def test_every_link_within_the_project_leads_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", (ROOT / page).read_text()):
        if "://" not in target:
            place = (ROOT / page).parent / target if target else ROOT / page
            assert place.exists(), f"{page} leads to {target}, which is not there"
            assert not anchor or anchor in anchors(place), f"{page} leads to {target}#{anchor}, which is not there"


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PROSE])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    for test_id in TEST_ID.findall(text):
        file, name = test_id.split("::")
        assert name in marks_of(ROOT / file), f"{page} names {test_id}, which does not exist"
    for file in re.findall(r"tests/[\w/*]+\.\w+", text):
        assert list(ROOT.glob(file)), f"{page} names {file}, which is not there"


def test_every_decision_has_a_number_of_its_own_and_none_that_is_referred_to_is_missing() -> None:
    pages = (ROOT / "ARCHITECTURE.md", ROOT / "docs" / "architecture-durable.md")
    numbers = Counter(
        number for page in pages for number in re.findall(r"^\*\*(D\d+)\.", page.read_text(), re.MULTILINE)
    )
    assert [number for number, times in numbers.items() if times > 1] == []
    folders = ("dispatch_core", "gateway_sdk", "relay_sdk", "migrations", "tests", "benchmarks", "docs", "examples")
    files = [*ROOT.glob("*.md"), *(file for name in folders for file in (ROOT / name).rglob("*.*"))]
    texts = (file.read_text() for file in files if file.suffix in (".md", ".py", ".sql"))
    assert {number for text in texts for number in re.findall(r"\bD\d{1,3}\b", text)} <= set(numbers)


def test_every_code_is_on_the_page_of_handlers_and_no_other() -> None:
    places = [ROOT / name for name in ("dispatch_core", "gateway_sdk", "relay_sdk", "migrations")]
    sources = (file.read_text() for place in places for file in place.rglob("*") if file.suffix in (".py", ".sql"))
    code = re.compile(r"S2R(?:-[A-Z]+)+")
    page = (ROOT / "docs" / "handlers.md").read_text()
    assert set(code.findall(page)) == {found for text in sources for found in code.findall(text)}


def test_the_page_of_handlers_names_each_raised_code_with_its_class() -> None:
    page = (ROOT / "docs" / "handlers.md").read_text()
    for name in errors.__all__:
        error = getattr(errors, name)
        assert re.search(rf"^\| `{error.code}` \|.*`{name}`", page, re.MULTILINE), f"{name} is not with {error.code}"


def test_the_page_of_settings_is_what_the_settings_classes_say() -> None:
    done = subprocess.run(
        [sys.executable, "docs/settings_table.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_of_settings_that_differs_is_refused_with_a_diff(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    (tmp_path / "settings_table.py").write_text((ROOT / "docs" / "settings_table.py").read_text())
    (tmp_path / "settings.md").write_text(
        page.replace("`RELAY_GRACE_SECONDS` | s | `30`", "`RELAY_GRACE_SECONDS` | s | `60`")
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "settings_table.py"), "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=environment(PYTHONPATH=str(ROOT)),
    )
    assert done.returncode == 1
    assert "-| `RELAY_GRACE_SECONDS` | s | `60`" in done.stderr
    assert "+| `RELAY_GRACE_SECONDS` | s | `30`" in done.stderr
