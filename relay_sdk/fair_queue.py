"""What waits for its turn, by tenant: tenants take turns, and what each has keeps its order.

So a lone job does not stand behind a backlog of somebody else's that was claimed before it.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A line for each tenant."""

    __slots__ = ("_count", "_lines")

    def __init__(self) -> None:
        # The tenant whose turn it is comes first.
        self._lines: dict[str, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, tenant: str, item: T) -> None:
        """Let it wait behind the others of its tenant."""
        self._lines.setdefault(tenant, deque()).append(item)
        self._count += 1

    def take(self) -> T:
        """Return the next one.

        Raises: StopIteration where there is none.
        """
        tenant, line = next(iter(self._lines.items()))
        del self._lines[tenant]
        item = line.popleft()
        self._count -= 1
        if line:
            self._lines[tenant] = line
        return item

    def take_from_longer(self, tenant: str) -> T | None:
        """Return the last one of the longest line, where that is longer than the tenant's would be with one more."""
        longest = max(self._lines, key=lambda each: len(self._lines[each]), default=tenant)
        if len(self._lines.get(longest, ())) <= len(self._lines.get(tenant, ())) + 1:
            return None
        self._count -= 1
        return self._lines[longest].pop()

    def remove(self, tenant: str, item: T) -> None:
        """Let it wait no more. Idempotent: yes."""
        line = self._lines.get(tenant, deque())
        if item not in line:
            return
        line.remove(item)
        self._count -= 1
        if not line:
            del self._lines[tenant]

    def clear(self) -> None:
        """Forget all of them."""
        self._lines.clear()
        self._count = 0
