"""The sink that POSTs each event to an endpoint, signed as Standard Webhooks (1.0.0) says; needs the extra `webhooks`.

    webhook-id          the event's id: the same each time that it comes, for the receiver to tell
    webhook-timestamp   when this delivery was made, in seconds
    webhook-signature   "v1," and the HMAC-SHA256 of "id.timestamp.body" in base64, one for each secret

    2xx                 delivered
    410                 parked: the receiver wants no more
    429, 502, 503, 504  failed; not again before what Retry-After says
    anything else       failed, a redirect too: an event goes where its owner has said and nowhere else

What is kept of a failure is short and holds no secret: no URL and no part of one, no header, and the beginning of the
answer at most. Parts of fewer than six characters are not looked for: they are more often words than secrets.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import importlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote, unquote, unquote_plus, urlsplit

import anyio

from dispatch_core import codec
from dispatch_core.errors import ConfigurationError, RelayDispatchError
from dispatch_core.outbox import OutboxEvent, OutboxPark, OutboxRetry, OutboxSettings

__all__ = ["WebhookFailedError", "WebhookSink"]

_PREFIX: Final = "whsec_"
_KEY_BYTES: Final = (24, 64)
_OURS: Final = ("webhook-id", "webhook-timestamp", "webhook-signature")

_GONE: Final = 410
_OVERLOADED: Final = (429, 502, 503, 504)
_MAX_RETRY_AFTER: Final = 3600.0

_MAX_BODY_BYTES: Final = 8 * 1024 * 1024
_MAX_ANSWER_BYTES: Final = 65536
"""Read so that the connection can be used again; a longer answer is cut off, with its connection."""

_MAX_EXCERPT_BYTES: Final = 200
_LOOKED_AT_CHARS: Final = 8192
"""Of an answer, for secrets, before it is cut to an excerpt."""
_SECRET_CHARS: Final = 6
_SEPARATORS: Final = re.compile(r"[\s/?&=:@;,#]+")


class WebhookFailedError(RelayDispatchError):
    """A webhook was not accepted; it is sent again after a pause."""

    code = "S2R-WEBHOOK-FAILED"
    retryable = True


class WebhookSink:
    """Delivers events to one endpoint.

    The body is `{"type": kind, "timestamp": …, "data": payload}`, the time being the event's own; `body` makes another.
    Connections are kept between events; `aclose` closes them, and a drainer that ends calls it.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: str | Sequence[str],
        client: Any = None,
        timeout: float = 15.0,
        headers: Mapping[str, str] | None = None,
        body: Callable[[OutboxEvent], bytes] | None = None,
    ) -> None:
        """Take the endpoint, and what both sides know: base64, behind `whsec_`; while it is being changed, the new one
        and the old one.

        `client`: an AsyncClient of httpx2 or httpx, which stays open. `timeout`: seconds for all of a delivery.
        `headers`: sent besides.

        Raises: ConfigurationError, which quotes neither URL nor secrets; also where httpx2 is not installed.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError("the URL of a webhook must begin with https:// or http:// and name a host")
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ConfigurationError(f"the timeout of a webhook must be positive seconds, not {timeout!r}")
        secrets = [secret] if isinstance(secret, str) else list(secret)
        if not secrets:
            raise ConfigurationError("a webhook needs a secret to be signed with")
        self._url = url
        self._host = parts.hostname
        self._keys = [_key(each) for each in secrets]
        self._timeout = timeout
        self._headers = dict(headers or {})
        if any(name.lower() in _OURS for name in self._headers):
            raise ConfigurationError(f"{', '.join(_OURS)} are made for each webhook and cannot be given")
        self._body = body or _standard_body
        userinfo = parts.netloc.rpartition("@")[0]
        # What stands before the path otherwise, scheme and host, is no secret: it is told of each failure.
        told = (url, userinfo, _basic(userinfo), parts.path, parts.query, parts.fragment)
        self._hidden = _hidden(*told, *(each.removeprefix(_PREFIX) for each in secrets), *self._headers.values())
        self._given = client
        self._own: Any = None
        self._library: Any = None if client is not None else _library()

    def __repr__(self) -> str:
        return f"<WebhookSink {self._host}>"

    def check_settings(self, settings: OutboxSettings) -> None:
        """Refuse a timeout that the drain would not wait for. Raises: ConfigurationError."""
        if self._timeout > settings.sink_timeout_seconds:
            raise ConfigurationError(
                f"a webhook's timeout ({self._timeout:g} s) must not be above that of a sink, which is"
                f" {settings.sink_timeout_seconds:g} s (OUTBOX_SINK_TIMEOUT_SECONDS)"
            )

    async def __call__(self, event: OutboxEvent) -> None:
        """POST one event. Raises: OutboxPark, OutboxRetry, WebhookFailedError."""
        body = self._body(event)
        with anyio.move_on_after(self._timeout):
            await self._post(self._headers | self._signed(str(event.event_id), body), body)
            return
        raise WebhookFailedError(f"{self._host} did not answer within {self._timeout:g} s")

    async def aclose(self) -> None:
        """Close the connections that are its own; the next event opens one again. Idempotent: yes."""
        own, self._own = self._own, None
        if own is not None:
            await own.aclose()

    def _signed(self, webhook_id: str, body: bytes) -> dict[str, str]:
        seconds = str(int(time.time()))
        content = b".".join((webhook_id.encode(), seconds.encode(), body))
        digests = (hmac.digest(key, content, hashlib.sha256) for key in self._keys)
        return {
            "content-type": "application/json",
            "webhook-id": webhook_id,
            "webhook-timestamp": seconds,
            "webhook-signature": " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests),
        }

    async def _post(self, headers: dict[str, str], body: bytes) -> None:
        client = self._given or self._own
        if client is None:
            client = self._own = self._library.AsyncClient()
        try:
            async with client.stream(
                "POST", self._url, content=body, headers=headers, follow_redirects=False, timeout=self._timeout
            ) as response:
                status, answer = response.status_code, response.headers
                excerpt = await _read(response)
        except Exception as error:
            text = codec.sanitize(error, _MAX_ANSWER_BYTES)
            raise WebhookFailedError(f"{type(error).__name__}: {self._told(text)}") from error
        if 200 <= status < 300:
            return
        excerpt = self._told(excerpt)
        reason = f"{self._host} answered {status}{': ' if excerpt else ''}{excerpt}"
        if status == _GONE:
            raise OutboxPark(f"S2R-WEBHOOK-GONE: {reason}")
        if status in _OVERLOADED and (seconds := _retry_after(answer.get("retry-after"))):
            raise OutboxRetry(f"WebhookFailedError: {reason}", seconds)
        raise WebhookFailedError(reason)

    def _told(self, text: str) -> str:
        """Return what may be kept of an answer or an error."""
        kept = _hide(self._hidden, text[:_LOOKED_AT_CHARS])
        if len(text) > _LOOKED_AT_CHARS:
            # The end may be the beginning of a secret, which is not known by that.
            kept = kept[: -len(self._hidden[0])]
        plain = "".join(c if c.isprintable() else " " for c in kept)
        return codec.sanitize(" ".join(plain.split()), _MAX_EXCERPT_BYTES)


def _library() -> Any:
    try:
        return importlib.import_module("httpx2")
    except ImportError as error:
        raise ConfigurationError(
            "WebhookSink needs httpx2: pip install 'relay-dispatch[webhooks]', or give it a client (client=)"
        ) from error


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (ValueError, binascii.Error):
        raise ConfigurationError(f"a webhook's secret must be base64, behind {_PREFIX}") from None
    least, most = _KEY_BYTES
    if not least <= len(key) <= most:
        raise ConfigurationError(f"a webhook's secret must have {least} to {most} bytes, not {len(key)}")
    return key


def _hidden(*texts: str) -> list[str]:
    """Return what is to be hidden of texts, the longest first: each whole, its words, and its parts as a URL has them;
    as they are, with percent escapes and without.

    Parts of path, query and userinfo are hidden whatever they say: so an answer may lose an ordinary word of the path.
    """
    words = {word for text in texts for word in (text, *text.split(), *_SEPARATORS.split(text))}
    words |= {part for word in words for part in _SEPARATORS.split(unquote(word))}
    words |= {form for word in words for form in (unquote(word), unquote_plus(word))}
    words |= {form for word in words for form in (quote(word), quote(word, safe=""))}
    return sorted((word for word in words if len(word) >= _SECRET_CHARS), key=len, reverse=True)


def _hide(hidden: Sequence[str], text: str) -> str:
    """Return text with `***` where something hidden was, in capitals or not: escapes may come in either."""
    return re.sub("|".join(map(re.escape, hidden)), "***", text, flags=re.IGNORECASE)


def _basic(userinfo: str) -> str:
    """Return what a client makes of userinfo in the header of a request."""
    user, _, password = userinfo.partition(":")
    return base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode() if userinfo else ""


def _standard_body(event: OutboxEvent) -> bytes:
    when = event.created_at.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return codec.encode_payload({"type": event.kind, "timestamp": when, "data": event.payload}, _MAX_BODY_BYTES)


async def _read(response: Any) -> str:
    """Read an answer as far as it is short; return that, secrets and all, where it can be read."""
    start = bytearray()
    async for chunk in response.aiter_raw():
        start += chunk
        if len(start) > _MAX_ANSWER_BYTES:
            break
    return "" if response.headers.get("content-encoding") else start.decode("utf-8", "replace")


def _retry_after(value: str | None) -> float:
    """Return the seconds that a Retry-After asks for, up to an hour; 0 where it says nothing of use."""
    if value is None:
        return 0.0
    try:
        seconds = float(int(value)) if value.strip().isdecimal() else _seconds_until(parsedate_to_datetime(value))
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER)


def _seconds_until(moment: datetime) -> float:
    # Without a zone it is meant to be GMT.
    when = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return when.timestamp() - time.time()
