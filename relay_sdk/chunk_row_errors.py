"""Gather what a handler says of bad rows, up to a bound, until it is stored with a checkpoint or the completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from dispatch_core import codec
from dispatch_core import durable_input as check
from dispatch_core.durable_models import RowError
from dispatch_core.errors import InvalidInputError

__all__ = ["RowErrors", "batches"]

_MAX_BYTES: Final = 32 * 1024 * 1024
_BATCH_BYTES: Final = 4 * 1024 * 1024
_ROW_BYTES: Final = 100
_MAX_MESSAGE_BYTES: Final = 2000
_MAX_CODE_BYTES: Final = 200


class RowErrors:
    """Those of one chunk. Ones from before a transaction that were sent in it stay until it is over: it may be rolled
    back. Ones that were told in it are forgotten when they are sent: a rollback takes them back anyway.
    """

    __slots__ = ("_bytes", "_limit", "_max_data_bytes", "items", "sent")

    def __init__(self, limit: int, max_data_bytes: int) -> None:
        self._limit = limit
        self._max_data_bytes = min(max_data_bytes, check.MAX_DETAIL_BYTES)
        self._bytes = 0
        self.items: list[RowError] = []
        self.sent = 0
        """How many of `items` were sent in the transaction that is open."""

    def add(self, row: int, code: str, message: str, data: Any) -> None:
        """Keep one.

        Raises: InvalidInputError for what cannot be stored, or where too many wait.
        """
        if len(self.items) >= self._limit or self._bytes >= _MAX_BYTES:
            raise InvalidInputError(
                f"{len(self.items)} row errors wait to be stored, which are as many as may (RELAY_CHUNK_ROW_ERRORS, or"
                f" {_MAX_BYTES >> 20} MiB): save a checkpoint more often, which stores them"
            )
        row = check.number("row", row)
        code = check.text_or_none("code", code, _MAX_CODE_BYTES) or ""
        message = codec.sanitize(message, _MAX_MESSAGE_BYTES)
        size = _ROW_BYTES + len(code) + len(message)
        if data is not None:
            size += len(check.json_text("data", data, self._max_data_bytes))
        self._bytes += size
        self.items.append(RowError(row, code, message, data))

    @property
    def unsent(self) -> list[RowError]:
        """Those that are in no transaction."""
        return self.items[self.sent :] if self.sent else self.items

    def were_sent(self, mark: tuple[int, int]) -> None:
        """Note that all of them are in the open transaction, which began at `mark`."""
        del self.items[mark[0] :]
        self._bytes = mark[1]
        self.sent = len(self.items)

    def committed(self) -> None:
        """Forget those that were sent."""
        del self.items[: self.sent]
        self.sent = 0
        if not self.items:
            self._bytes = 0

    def mark(self) -> tuple[int, int]:
        """Return what `rolled_back` is to be told of a transaction that begins now."""
        return len(self.items), self._bytes

    def rolled_back(self, mark: tuple[int, int]) -> None:
        """Have those back that were there when the transaction began; what it told is undone."""
        self.sent = 0
        del self.items[mark[0] :]
        self._bytes = mark[1] if self.items else 0

    def take(self) -> list[RowError]:
        """Return all of them, and keep none."""
        taken, self.items, self.sent, self._bytes = self.items, [], 0, 0
        return taken


def batches(errors: list[RowError], rows: int) -> Iterator[list[RowError]]:
    """Yield them in parts for one statement each: so many `rows`, or about 4 MiB of text without their data."""
    some = max(1, min(rows, _BATCH_BYTES // (_ROW_BYTES + _MAX_MESSAGE_BYTES)))
    for start in range(0, len(errors), some):
        yield errors[start : start + some]
