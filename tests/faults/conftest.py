"""Fixtures of the tests of faults; those of tests/conftest.py are here too.

pair    a primary without a standby yet, and room for one: see `tests.support.replication`
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.replication import Pair, required_binaries


@pytest.fixture
def pair(binaries: Path | None) -> Iterator[Pair]:
    """Two servers to fail over once."""
    with Pair.start(required_binaries(binaries)) as pair:
        yield pair
