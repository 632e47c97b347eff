"""Make docs/settings.md from the settings classes, or tell where it differs from them.

python docs/settings_table.py           print it
python docs/settings_table.py --write   write docs/settings.md
python docs/settings_table.py --check   exit 1, with a diff, where the file is not what the classes say (`make check`)
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from dispatch_core.settings import CoreSettings, DurableJobsSettings, OutboxSettings, Settings
from gateway_sdk.settings import GatewaySettings
from relay_sdk.settings import RelaySettings

PAGE: Final = Path(__file__).with_name("settings.md")
CLASSES: Final[tuple[type[Settings], ...]] = (
    CoreSettings,
    GatewaySettings,
    RelaySettings,
    OutboxSettings,
    DurableJobsSettings,
)

UNITS: Final = {"_seconds": "s", "_sec": "s", "_bytes": "bytes", "dsn": "URL", "_name": "text", "routes": "JSON"}
"""By the end of a name; a number without such an end is a count."""

MULTIPLES: Final = {"s": ((86400, "days"),), "bytes": ((1024 * 1024, "MiB"), (1024, "KiB"))}

HEAD: Final = """\
# Settings

Each is an environment variable, and a field of a settings class: `RELAY_DISPATCH_…` of
`dispatch_core.settings.CoreSettings`, `GATEWAY_…` of `gateway_sdk.GatewaySettings`, `RELAY_…` of
`relay_sdk.RelaySettings`, `OUTBOX_…` of `dispatch_core.settings.OutboxSettings`, `DURABLE_…` of
`dispatch_core.settings.DurableJobsSettings`. What is given in code comes before the environment, and that before the
default. A wrong value is a `ConfigurationError` at the start, which names the variable.

This page is made from the classes: `python docs/settings_table.py --write`; `make check` fails where it differs.

| name | unit | default | allowed | what it does |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows())


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Return a row for each setting: name, unit, default, allowed values, description."""
    for settings in CLASSES:
        prefix = str(settings.model_config.get("env_prefix", ""))
        for name, field in settings.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
                continue  # it has rows of its own
            assert field.description, f"{settings.__name__}.{name} has no description"
            # A name of its own, such as OUTBOX_DRAIN_INTERVAL_SEC, stands before the prefix.
            variable = str(field.validation_alias or prefix + name).upper()
            unit = _unit(name, field.default)
            text = field.description.replace("|", "\\|")
            yield f"`{variable}`", unit, _default(field.default, unit), _allowed(field.metadata), text


def _unit(name: str, default: object) -> str:
    for end, unit in UNITS.items():
        if name.endswith(end):
            return unit
    if isinstance(default, bool):
        return "true, false"
    return "count" if isinstance(default, int) else "text"


def _default(value: object, unit: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        value = int(value) if value.is_integer() else value
    if isinstance(value, (int, float)):
        for size, word in MULTIPLES.get(unit, ()):
            if value >= size and value % size == 0:
                return f"`{value}` ({value // size:g} {word})"
    return f"`{value}`"


def _allowed(metadata: Iterable[Any]) -> str:
    bounds = {key: getattr(mark, key) for mark in metadata for key in ("gt", "ge", "le", "lt") if hasattr(mark, key)}
    sizes = {key: getattr(mark, key) for mark in metadata for key in ("min_length", "max_length") if hasattr(mark, key)}
    parts = []
    if "gt" in bounds:
        parts.append(f"above {bounds['gt']:g}")
    if "ge" in bounds:
        parts.append(f"from {bounds['ge']}")
    if "le" in bounds:
        parts.append(f"to {_number(bounds['le'])}")
    if sizes:
        parts.append(f"{sizes.get('min_length', 0)} to {sizes['max_length']} characters")
    return " ".join(parts)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


def forgotten() -> list[str]:
    """Return the settings classes of the packages that this page does not know of."""
    found: list[type] = [Settings]
    for each in found:
        found.extend(each.__subclasses__())
    return [each.__name__ for each in found if each is not Settings and each not in CLASSES]


def main(arguments: list[str] | None = None) -> int:
    """Print, write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(description="Make docs/settings.md from the settings classes.")
    parser.add_argument("--write", action="store_true", help="write docs/settings.md")
    parser.add_argument("--check", action="store_true", help="exit 1, with a diff, where docs/settings.md differs")
    options = parser.parse_args(arguments)
    if missing := forgotten():
        sys.stderr.write(f"docs/settings_table.py does not list {', '.join(missing)}\n")
        return 1
    text = page()
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if not options.check:
        sys.stdout.write(text)
        return 0
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if old == text:
        return 0
    diff = difflib.unified_diff(old.splitlines(True), text.splitlines(True), "docs/settings.md", "the settings classes")
    sys.stderr.writelines(diff)
    sys.stderr.write("docs/settings.md is out of date: python docs/settings_table.py --write\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
