"""Find the relays that a command names: `package.module:attribute`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dispatch_core.cli.load import load_attribute
from dispatch_core.errors import ConfigurationError
from relay_sdk.relay import Relay

__all__ = ["load_relays"]


def load_relays(targets: Sequence[str], app_dir: Path) -> list[Relay]:
    """Import the relays; `app_dir` comes first among the places where modules are looked for.

    Raises: ConfigurationError, which says what was wrong with which target and what there is instead.
    """
    relays: list[Relay] = []
    for target in targets:
        relay = load_attribute(target, app_dir, Relay, word="relay", example="myapp.relays:erp")
        if relay in relays:
            raise ConfigurationError(f"{target} is named twice")
        relays.append(relay)
    return relays
