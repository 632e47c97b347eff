"""Decide where a claim begins to look; the outbox does it in the same way, so it is in `dispatch_core.cursor`."""

from __future__ import annotations

from dispatch_core.cursor import ClaimCursor

__all__ = ["ClaimCursor"]
