"""The layers of pyproject.toml hold, as `lint-imports` sees them; and a broken one would be seen."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_import_goes_down_the_layers() -> None:
    # By module and not by its script, which may be another environment's.
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_contracts_name_the_packages_there_are() -> None:
    """A new package without a contract would be checked by nothing."""
    text = (ROOT / "pyproject.toml").read_text()
    packages = sorted(path.parent.name for path in ROOT.glob("*_*/__init__.py"))
    assert packages == ["dispatch_core", "gateway_sdk", "relay_sdk"]
    for package in packages:
        assert f'"{package}"' in text.split("[tool.importlinter]")[1]


def test_whoever_expects_the_database_to_fail_names_the_one_list_of_its_errors() -> None:
    """A list written out anew forgets one kind: it was the driver's error of a session that has just been ended."""
    broad = {"PostgresError", "InterfaceError", "InternalClientError"}
    found = []
    for package in ("dispatch_core", "gateway_sdk", "relay_sdk"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = {part.attr for part in getattr(node, "elts", ()) if isinstance(part, ast.Attribute)}
                if isinstance(node, ast.Tuple) and len(names & broad) > 1:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert [place.partition(":")[0] for place in found] == ["dispatch_core/driver_errors.py"], found
