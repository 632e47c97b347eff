"""Read the demo's input: one request a line, as JSON. A line that is no good is told by number and reason, and skipped.

    {"tenant": "acme", "relay": "erp", "operation": "TotalOrder", "json": {…}, "ttl": 30}

    tenant, relay, operation   required, text
    json | body | document     a JSON value, a text, or {"kb": 200, "seed": 7}, which stands for that many thousand
                               bytes made from the seed; with none of them the body is empty
    headers                    a map of text to text or lists of text
    ttl, delay                 seconds; without ttl the demo gives the job 30
    max_attempts, key          as in enqueue
    expect                     {"status": …, "json": …, "error": …}: how it must end, each part optional

Empty lines and lines that begin with # are passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dispatch_core.codec import UNSET, check_name
from dispatch_core.dispatch import prepare
from dispatch_core.errors import InvalidInputError
from dispatch_core.models import DispatchRequest, DispatchResult, DispatchStatus

__all__ = ["DEFAULT_TTL_SECONDS", "BadLine", "DemoLine", "Expectation", "read_lines"]

DEFAULT_TTL_SECONDS: Final = 30.0
MAX_DOCUMENT_KB: Final = 8000

_KNOWN: Final = frozenset(
    "tenant relay operation json body document headers ttl delay max_attempts key expect".split(),
)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be sent."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Expectation:
    """How a job must end; what is UNSET or None may be anything."""

    status: DispatchStatus | None = None
    error: str | None = None
    json: Any = UNSET

    def difference(self, result: DispatchResult) -> str | None:
        """Say in what the result differs; None where it is as expected."""
        if self.status is not None and result.status is not self.status:
            return f"{result.status}{f' ({result.error_code})' if result.error_code else ''} instead of {self.status}"
        if self.error is not None and result.error_code != self.error:
            return f"error {result.error_code} instead of {self.error}"
        if self.json is not UNSET:
            try:
                answer = result.json()
            except InvalidInputError:
                return "the answer is no JSON"
            if answer != self.json:
                return "another answer"
        return None


@dataclass(frozen=True, slots=True)
class DemoLine:
    """One request of one tenant."""

    line: int
    tenant: str
    fields: Mapping[str, Any]
    expect: Expectation | None

    @property
    def operation(self) -> str:
        return str(self.fields["operation"])

    @property
    def relay(self) -> str:
        return str(self.fields["relay"])

    def request(self) -> DispatchRequest:
        """Return what is enqueued. A document is made here, so that it lies in memory only while it is sent."""
        fields, document = self.fields, self.fields.get("document")
        return DispatchRequest(
            fields["relay"],
            fields["operation"],
            headers=fields.get("headers"),
            body=fields.get("body") if document is None else _document(document),
            json=fields.get("json", UNSET),
            ttl=fields.get("ttl", DEFAULT_TTL_SECONDS),
            delay=fields.get("delay"),
            max_attempts=fields.get("max_attempts", 1),
            idempotency_key=fields.get("key"),
        )


def read_lines(lines: Iterable[bytes]) -> Iterator[DemoLine | BadLine]:
    """Read every line that holds something."""
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if number == 1:
            text = text.removeprefix(b"\xef\xbb\xbf")
        if not text or text.startswith(b"#"):
            continue
        try:
            yield _read(number, text)
        except InvalidInputError as error:
            yield BadLine(number, str(error))


def _read(number: int, text: bytes) -> DemoLine:
    try:
        fields = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidInputError("not a JSON object")
    if unknown := sorted(fields.keys() - _KNOWN):
        raise InvalidInputError(f"unknown field {', '.join(map(repr, unknown))}")
    if missing := [name for name in ("tenant", "relay", "operation") if name not in fields]:
        raise InvalidInputError(f"{', '.join(missing)} missing")
    if len(fields.keys() & {"json", "body", "document"}) > 1:
        raise InvalidInputError("give one of json, body and document")
    if not isinstance(fields.get("body", ""), str):
        raise InvalidInputError("body must be text")
    if "document" in fields:
        _check_document(fields["document"])
    line = DemoLine(number, check_name("tenant", fields["tenant"]), fields, _expectation(fields.get("expect")))
    # What the SDK would refuse is refused here, by the same code, before anything is sent.
    prepare(line.request())
    return line


def _check_document(document: object) -> None:
    if not isinstance(document, dict) or document.keys() != {"kb", "seed"}:
        raise InvalidInputError("document must be {kb, seed}")
    kb, seed = document["kb"], document["seed"]
    if type(kb) is not int or type(seed) is not int or not 0 <= kb <= MAX_DOCUMENT_KB:
        raise InvalidInputError(f"document: kb must be 0 to {MAX_DOCUMENT_KB}, and kb and seed whole numbers")


def _document(document: Mapping[str, int]) -> bytes:
    return hashlib.shake_256(str(document["seed"]).encode()).digest(document["kb"] * 1000)


def _expectation(fields: object) -> Expectation | None:
    if fields is None:
        return None
    if not isinstance(fields, dict) or not fields.keys() <= {"status", "error", "json"}:
        raise InvalidInputError("expect must be {status, error, json}, each optional")
    status = fields.get("status")
    try:
        wanted = None if status is None else DispatchStatus(status)
    except ValueError:
        raise InvalidInputError(f"expect: no such status: {status!r}") from None
    return Expectation(wanted, fields.get("error"), fields.get("json", UNSET))
