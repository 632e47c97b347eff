"""docs/cases.md is true: the tests that it names exist and carry the number, and every number has some."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "cases.md").read_text()
ROWS = {row[0]: row[1] for row in re.findall(r"^\| (C\d\d) \| (.*) \|$", PAGE, re.MULTILINE)}
NUMBERS = (
    "C01", "C02", "C03", "C05", "C07", "C08", "C09", "C12", "C14", "C15", "C17", "C18", "C21", "C22", "C24", "C25",
    "C29", "C30", "C34", "C38", "C39", "C40", "C41", "C43", "C46",
)  # fmt: skip


@cache
def marks(path: Path) -> dict[str, set[str]]:
    """Return the cases that each test of a file carries, its own and those of its file."""
    tree = ast.parse(path.read_text())
    of_all: set[str] = set()
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(name, "id", "") == "pytestmark" for name in node.targets):
            of_all |= _cases(node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found[node.name] = set().union(*map(_cases, node.decorator_list))
    return {name: cases | of_all for name, cases in found.items()}


def _cases(node: ast.AST) -> set[str]:
    return set(re.findall(r"case\('(C\d\d)'\)", ast.unparse(node)))


def test_the_page_has_a_row_for_every_number_in_their_order() -> None:
    assert tuple(ROWS) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_the_tests_that_are_named_for_a_case_exist_and_carry_its_number(number: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", ROWS[number])
    assert len(named) >= 3
    for path, name in named:
        assert name in marks(ROOT / path), f"there is no {path}::{name}"
        assert number in marks(ROOT / path)[name], f"{path}::{name} does not carry {number}"


def test_every_number_that_a_test_carries_is_on_the_page() -> None:
    carried = {
        number for path in (ROOT / "tests").rglob("test_*.py") for cases in marks(path).values() for number in cases
    }
    assert carried == set(NUMBERS)
