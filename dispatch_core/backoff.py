"""Space repeated tries: exponential with full jitter, so that many clients never come back in step."""

from __future__ import annotations

import random
from typing import Final

__all__ = ["Backoff", "full_jitter"]

# 2 to the 60th of any base is above any cap; a larger exponent would only overflow the float.
_MAX_EXPONENT: Final = 60

_shared_rng: Final = random.Random()


def full_jitter(attempt: int, base: float, cap: float, rng: random.Random = _shared_rng) -> float:
    """Return the seconds to wait after the `attempt`-th failure, the first being 1.

    Uniform between 0 and the smaller of `cap` and ``base * 2 ** (attempt - 1)``, both in seconds.
    """
    ceiling = min(cap, base * float(2 ** min(max(attempt - 1, 0), _MAX_EXPONENT)))
    return rng.uniform(0.0, max(ceiling, 0.0))


class Backoff:
    """The delays of one series of tries: call `next` after each failure and `reset` after a success."""

    __slots__ = ("_base", "_cap", "_rng", "attempt")

    def __init__(self, base: float, cap: float, rng: random.Random = _shared_rng) -> None:
        """Take `base` and `cap` in seconds."""
        self._base = base
        self._cap = cap
        self._rng = rng
        self.attempt = 0
        """How many failures there were since the last success."""

    def next(self) -> float:
        """Count a failure and return the seconds to wait before the next try."""
        self.attempt += 1
        return full_jitter(self.attempt, self._base, self._cap, self._rng)

    def reset(self) -> None:
        """Forget the failures: the last try succeeded."""
        self.attempt = 0
