"""Cut SQL text into statements, as far as the migration runner must understand it.

Two rules need it: a ``-- no-transaction`` file holds exactly one statement, and no file ends the
runner's transaction itself. It knows comments, every kind of quoting and ``BEGIN ATOMIC`` bodies,
the way psql does, and nothing more of the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["split_statements", "words"]

_TOKEN = re.compile(
    r"""
      (?P<line>--[^\n]*)
    | (?P<block>/\*)
    | (?P<escape>(?<![A-Za-z0-9_$])[eE]'(?:[^'\\]|\\.|'')*')
    | (?P<string>'(?:[^']|'')*')
    | (?P<ident>"(?:[^"]|"")*")
    | (?P<dollar>(?<![A-Za-z0-9_$])\$(?P<tag>(?:[A-Za-z_\x80-\uffff][A-Za-z0-9_\x80-\uffff]*)?)\$)
    | (?P<word>[A-Za-z_\x80-\uffff][A-Za-z0-9_$\x80-\uffff]*)
    | (?P<open>[(\[])
    | (?P<close>[)\]])
    | (?P<end>;)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_EDGE = re.compile(r"/\*|\*/")


def split_statements(text: str) -> list[str]:
    """Return the statements of `text`, without comments around them and without their semicolons.

    Raises:
        ValueError: a quote or a comment is not closed.
    """
    statements: list[str] = []
    start = end = -1
    depth = 0
    seen: list[str] = []
    body = 0  # inside BEGIN ATOMIC … END, where a semicolon ends nothing
    for kind, value, first, after in _tokens(text):
        if kind in ("line", "block"):
            continue
        if kind == "end" and depth == 0 and body == 0:
            if start >= 0:
                statements.append(text[start:end])
            start, seen = -1, []
            continue
        if kind == "other" and value.isspace():
            continue
        if start < 0:
            start = first
        end = after
        if kind == "open":
            depth += 1
        elif kind == "close":
            depth = max(0, depth - 1)
        elif kind == "word":
            word = value.lower()
            if body and word in ("case", "begin"):
                body += 1
            elif body and word == "end":
                body -= 1
            elif word == "atomic" and seen and seen[-1] == "begin" and seen[0] == "create":
                body = 1
            seen.append(word)
    if start >= 0:
        statements.append(text[start:end])
    return statements


def words(statement: str, limit: int = 12) -> list[str]:
    """Return the first unquoted words of a statement, in lower case; quoted names keep their quotes."""
    found: list[str] = []
    for kind, value, _, _ in _tokens(statement):
        if kind == "word":
            found.append(value.lower())
        elif kind == "ident" or (kind == "other" and value == "."):
            found.append(value)
        elif kind == "open":
            found.append("(")
        if len(found) >= limit:
            break
    return found


def _tokens(text: str) -> Iterator[tuple[str, str, int, int]]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None  # the last alternative takes any character
        kind, value, after = match.lastgroup or "other", match.group(), match.end()
        if kind == "tag":  # lastgroup names the innermost group when it closes last
            kind = "dollar"
        if kind == "block":
            after = _end_of_comment(text, after)
        elif kind == "dollar":
            closing = text.find(value, after)
            if closing < 0:
                raise ValueError(_unclosed("a dollar-quoted string", text, at))
            after = closing + len(value)
        elif kind == "other" and value in "'\"":
            raise ValueError(_unclosed("a quote", text, at))
        yield kind, text[at:after], at, after
        at = after


def _end_of_comment(text: str, at: int) -> int:
    opened, depth = at - 2, 1
    while depth:
        edge = _COMMENT_EDGE.search(text, at)
        if edge is None:
            raise ValueError(_unclosed("a comment", text, opened))
        depth += 1 if edge.group() == "/*" else -1
        at = edge.end()
    return at


def _unclosed(what: str, text: str, at: int) -> str:
    line = text.count("\n", 0, at) + 1
    return f"line {line}: {what} is not closed"
