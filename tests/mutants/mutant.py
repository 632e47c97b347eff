"""A mutant: one place of a file, said in another way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, init=False)
class Mutant:
    """What is replaced, in one function of one file, and what that is in words."""

    file: str
    function: str
    """Of SQL: without the schema. Of Python: its line, or ''."""
    name: str
    changes: tuple[tuple[str, str], ...]
    test: str
    """The test that tells it, as pytest names it, without `tests/`; '' = the machine of its room does."""
    equivalent: str
    """Why nothing can tell it, where nothing can; else ''."""

    def __init__(
        self, file: str, function: str, name: str, *changes: str, test: str = "", equivalent: str = ""
    ) -> None:
        pairs = tuple(zip(changes[::2], changes[1::2], strict=True))
        fields = {"file": file, "function": function, "name": name, "changes": pairs}
        for field, value in {**fields, "test": test, "equivalent": equivalent}.items():
            object.__setattr__(self, field, value)

    @property
    def title(self) -> str:
        return f"{self.function.removesuffix('(')}: {self.name}"

    @property
    def is_sql(self) -> bool:
        return self.file.endswith(".sql")

    def text(self, root: Path) -> str:
        """Return the changed file of those below `root`. Raises: LookupError where a text is not there, or twice."""
        text = (root / self.file).read_text()
        begin, end = self._place(text)
        part = text[begin:end]
        for old, new in self.changes:
            if part.count(old) != 1:
                raise LookupError(f"{self.file} has {part.count(old)} of {old!r} in {self.function}")
            part = part.replace(old, new)
        return text[:begin] + part + text[end:]

    def _place(self, text: str) -> tuple[int, int]:
        if not self.function:
            return 0, len(text)
        opening = f"create or replace function relay.{self.function}(" if self.is_sql else self.function
        begin = text.find(opening)
        if begin < 0:
            raise LookupError(f"{self.file} has no {opening!r}")
        following = r"^create or replace function " if self.is_sql else r"^ {0,4}(?:async )?def |^class "
        after = re.compile(following, re.MULTILINE).search(text, begin + len(opening))
        return begin, len(text) if after is None else after.start()
