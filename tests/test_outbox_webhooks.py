"""Webhooks as Standard Webhooks says: signed so that others' code verifies it, and failures that tell no secret."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from uuid import UUID

import anyio
import httpx
import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from dispatch_core.errors import ConfigurationError
from dispatch_core.outbox import OutboxEvent, OutboxPark, OutboxRetry, OutboxSettings
from gateway_sdk import OutboxDrainer, WebhookSink
from gateway_sdk.webhooks import WebhookFailedError
from tests.support.databases import TestDatabase
from tests.support.outbox import KIND, write
from tests.support.protocol import OUTBOX, TENANT, Connection

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
OLD_SECRET = "whsec_" + base64.b64encode(b"o" * 24).decode()
EVENT_ID = UUID("0190d6c1-7e00-7000-8000-00000000abcd")


class Request:
    """What came."""

    def __init__(self, line: str, headers: dict[str, str], body: bytes) -> None:
        self.line = line
        self.headers = headers
        self.body = body


class Endpoint:
    """An HTTP server that answers as it is told, and keeps what came."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.connections = 0
        self.status = "204 No Content"
        self.headers: dict[str, str] = {}
        self.body = b""
        self.silent = False
        self.port = 0
        self.serving: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks/path-s3cret?token=query-s3cret"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:-2])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append(Request(head[0], headers, body))
                if self.silent:
                    await asyncio.Event().wait()
                answer = {"content-length": str(len(self.body))} | self.headers
                lines = "".join(f"{name}: {value}\r\n" for name, value in answer.items())
                writer.write(f"HTTP/1.1 {self.status}\r\n{lines}\r\n".encode() + self.body)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def endpoint() -> AsyncIterator[Endpoint]:
    """Open an endpoint for the length of the block."""
    it = Endpoint()
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    it.port = server.sockets[0].getsockname()[1]
    try:
        yield it
    finally:
        server.close()
        # One that is silent waits for ever, and would be found by the collector in another test's time.
        for task in it.serving:
            task.cancel()
        await asyncio.gather(*it.serving, return_exceptions=True)


@asynccontextmanager
async def sink_to(it: Endpoint, **options: Any) -> AsyncIterator[WebhookSink]:
    """Make a sink for the length of the block."""
    sink = WebhookSink(it.url, **{"secret": SECRET, **options})
    try:
        yield sink
    finally:
        await sink.aclose()


def event(payload: Any = None, kind: str = "order.placed") -> OutboxEvent:
    """Make an event by hand."""
    when = datetime(2026, 11, 3, 20, 26, 10, 344522, tzinfo=UTC)
    return OutboxEvent(EVENT_ID, TENANT, kind, None, {"order": 7} if payload is None else payload, when, 0)


async def test_an_event_is_posted_in_the_standard_shape_and_other_peoples_code_verifies_it() -> None:
    async with endpoint() as it, sink_to(it, headers={"authorization": "Bearer abcdefgh"}) as sink:
        await sink(event({"ø": 2**70}))
        await sink(event())
    first, second = it.requests
    assert it.connections == 1
    assert first.line == "POST /hooks/path-s3cret?token=query-s3cret HTTP/1.1"
    assert first.headers["content-type"] == "application/json"
    assert first.headers["authorization"] == "Bearer abcdefgh"
    assert first.headers["webhook-id"] == second.headers["webhook-id"] == str(EVENT_ID)
    assert abs(int(first.headers["webhook-timestamp"]) - time.time()) < 60
    body = Webhook(SECRET).verify(first.body, first.headers)
    assert body == {"type": "order.placed", "timestamp": "2026-11-03T20:26:10.344522Z", "data": {"ø": 2**70}}
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(first.body + b" ", first.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(first.body, first.headers | {"webhook-id": "another"})


async def test_the_signature_is_the_hmac_of_id_time_and_body_by_every_secret() -> None:
    async with endpoint() as it, sink_to(it, secret=[SECRET, OLD_SECRET], body=lambda _: b"as it is") as sink:
        await sink(event())
    (request,) = it.requests
    assert request.body == b"as it is"
    signed = f"{EVENT_ID}.{request.headers['webhook-timestamp']}.as it is".encode()
    expected = [base64.b64encode(hmac.new(k, signed, hashlib.sha256).digest()).decode() for k in (b"k" * 32, b"o" * 24)]
    assert request.headers["webhook-signature"] == f"v1,{expected[0]} v1,{expected[1]}"
    for secret in (SECRET, OLD_SECRET):
        Webhook(secret).verify(request.body, request.headers, json_parse=False)


@pytest.mark.parametrize("status", ["200 OK", "201 Created", "202 Accepted", "299 Whatever"])
async def test_every_2xx_is_a_delivery(status: str) -> None:
    async with endpoint() as it, sink_to(it) as sink:
        it.status, it.body = status, b"thanks"
        await sink(event())
        await sink(event())
    assert it.connections == 1  # the answer was read, so the connection was used again


@pytest.mark.parametrize(
    ("status", "headers", "error", "delay"),
    [
        ("410 Gone", {}, OutboxPark, None),
        ("429 Too Many Requests", {"retry-after": "120"}, OutboxRetry, (120, 120)),
        ("503 Service Unavailable", {"retry-after": "in a while"}, WebhookFailedError, None),
        ("503 Service Unavailable", {"retry-after": "-5"}, WebhookFailedError, None),
        ("503 Service Unavailable", {"retry-after": "9" * 40}, OutboxRetry, (3600, 3600)),
        ("503 Service Unavailable", {"retry-after": "DATE"}, OutboxRetry, (500, 600)),
        ("503 Service Unavailable", {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, WebhookFailedError, None),
        ("500 Internal Server Error", {"retry-after": "120"}, WebhookFailedError, None),
        ("302 Found", {"location": "http://127.0.0.1:9/elsewhere"}, WebhookFailedError, None),
        ("404 Not Found", {}, WebhookFailedError, None),
        ("100 Continue", {}, WebhookFailedError, None),
    ],
)
async def test_an_answer_decides_whether_and_when_it_is_sent_again(
    status: str, headers: dict[str, str], error: type[Exception], delay: tuple[float, float] | None
) -> None:
    if headers.get("retry-after") == "DATE":
        headers = {"retry-after": format_datetime(datetime.now(UTC) + timedelta(seconds=600), usegmt=True)}
    async with endpoint() as it, sink_to(it, timeout=1.0 if status.startswith("1") else 60) as sink:
        it.status, it.headers = status, headers
        with pytest.raises(error) as caught:
            await sink(event())
    # Nothing was followed; and where the time is up by the end, it may be before a request is there.
    assert len(it.requests) == 1 or (status.startswith("1") and it.requests == [])
    if delay is not None:
        assert isinstance(caught.value, OutboxRetry)
        assert delay[0] <= caught.value.delay <= delay[1]
    if not status.startswith("1"):
        assert status[:3] in str(caught.value)


async def test_what_is_kept_of_a_failure_is_short_and_holds_no_secret() -> None:
    echo = f"{SECRET} Bearer-token-1 /hooks/path-s3cret?token=query-s3cret \x1b[2J\n  {'long ' * 50_000}"
    async with endpoint() as it, sink_to(it, headers={"x-auth": "Bearer-token-1"}) as sink:
        it.status, it.body = "500 No", echo.encode()
        with pytest.raises(WebhookFailedError) as caught:
            await sink(event())
        told = str(caught.value)
        assert told.startswith("127.0.0.1 answered 500: ")
        assert len(told) < 300
        for secret in ("path-s3cret", "query-s3cret", "Bearer-token-1", SECRET[6:20], "\x1b", "\n"):
            assert secret not in told
        assert repr(sink) == "<WebhookSink 127.0.0.1>"
        it.body = b"x" * 190 + b" path-s3cret"
        with pytest.raises(WebhookFailedError, match=r" x{190} \*\*\*$"):
            await sink(event())
        it.headers, it.body = {"content-encoding": "gzip"}, b"\x1f\x8b garbage"
        with pytest.raises(WebhookFailedError, match=r"^127.0.0.1 answered 500$"):
            await sink(event())


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("no_service XXsecretXX", "no_service ***"),
        ("unknown token abcdef1234567890", "unknown token ***"),
        ("key ABCDEF1234567890", "key ***"),
        ("user u5er:p4ss/w0rd-x", "user ***"),
        ("p4ss%2Fw0rd-x, p4ss%2fw0rd-x", "***, ***"),
        (base64.b64encode(b"u5er:p4ss/w0rd-x").decode(), "***"),
        ("sid=c00kie-s3cret", "sid=***"),
        ("no zone in b\u00e9-s3cret or b%C3%A9-s3cret", "no zone in *** or ***"),
        # Hidden first and cut afterwards: nothing is left of one that lies across the cut.
        ("x" * 192 + " XXsecretXX", "x" * 192 + " ***"),
        ("XXsecretXX " * 800, "*** " * 49 + "*\u2026"),
        # What is looked at ends in the middle of one.
        (" " * 8187 + "XXsecretXX", ""),
        ("no such order; the host is well", "no such order; the host is well"),
    ],
)
def test_no_part_of_a_url_or_of_a_header_is_kept_of_an_answer(answer: str, kept: str) -> None:
    url = "https://u5er:p4ss%2Fw0rd-x@h.example/services/T000/b%C3%A9-s3cret/XXsecretXX?token=abcdef1234567890"
    sink = WebhookSink(url, secret=SECRET, headers={"cookie": "sid=c00kie-s3cret; a=b"})
    assert sink._told(answer) == kept


async def test_silence_and_a_refused_connection_are_failures_that_name_no_url() -> None:
    async with endpoint() as it, sink_to(it, timeout=0.1) as sink:
        it.silent = True
        with pytest.raises(WebhookFailedError, match=r"127.0.0.1 did not answer within 0.1 s"):
            await sink(event())
    sink = WebhookSink("http://127.0.0.1:9/path-s3cret", secret=SECRET)
    with pytest.raises(WebhookFailedError) as caught:
        await sink(event())
    await sink.aclose()
    assert "path-s3cret" not in str(caught.value)
    assert "ConnectError" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "ftp://x-s3cret/"}, "https://"),
        ({"url": "/x-s3cret"}, "https://"),
        ({"secret": "whsec_not base64, s3cret"}, "base64"),
        ({"secret": "whsec_" + base64.b64encode(b"s3cret").decode()}, "24 to 64 bytes, not 6"),
        ({"secret": []}, "needs a secret"),
        ({"timeout": 0}, "positive"),
        ({"timeout": float("nan")}, "positive"),
        ({"headers": {"Webhook-Id": "s3cret"}}, "cannot be given"),
    ],
)
def test_what_could_never_be_delivered_is_refused_without_being_quoted(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        WebhookSink(**{"url": "https://example.com/", "secret": SECRET, **options})
    assert "s3cret" not in str(caught.value)


def test_without_httpx2_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'relay-dispatch\[webhooks\]'"):
        WebhookSink("https://example.com/", secret=SECRET)
    WebhookSink("https://example.com/", secret=SECRET, client=object())


def test_a_timeout_above_that_of_a_sink_is_refused_by_the_drainer() -> None:
    drainer = OutboxDrainer("postgresql://u@h/d", settings=OutboxSettings(sink_timeout_seconds=10))
    with pytest.raises(ConfigurationError, match="OUTBOX_SINK_TIMEOUT_SECONDS"):
        drainer.add_sink("a", WebhookSink("https://example.com/", secret=SECRET, timeout=11))


async def test_a_client_that_is_given_stays_open_and_may_be_of_httpx() -> None:
    async with endpoint() as it, httpx.AsyncClient() as client:
        sink = WebhookSink(it.url, secret=SECRET, client=client)
        await sink(event())
        await sink.aclose()
        await sink(event())
    assert len(it.requests) == 2


@pytest.mark.invariant("I7")
async def test_an_event_reaches_the_endpoint_from_the_database_and_a_refusal_is_written_to_it(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    (good,) = await write(gateway, {"order": 7})
    async with endpoint() as it:
        sink = WebhookSink(it.url, secret=SECRET)
        drainer = OutboxDrainer(database.gateway_dsn, default_sink=sink)
        assert (await drainer.drain_all()).delivered == 1
        assert it.requests[0].headers["webhook-id"] == str(good)
        assert json.loads(it.requests[0].body)["data"] == {"order": 7}
        it.status = "410 Gone"
        await write(gateway, "unwanted")
        it.headers = {}
        assert (await drainer.drain_all()).parked == 1
        it.status, it.headers = "429 Slow Down", {"retry-after": "1000"}
        await write(gateway, "later")
        assert (await drainer.drain_once()).failed == 1
    assert sink._own is None  # closed with each drain
    rows = await admin.fetch(
        f"select state, last_error, available_at > now() + interval '990 s' as late from {OUTBOX} where kind = $1"
        " order by seq",
        KIND,
    )
    assert [tuple(row) for row in rows] == [
        ("parked", "S2R-WEBHOOK-GONE: 127.0.0.1 answered 410", False),
        ("ready", "WebhookFailedError: 127.0.0.1 answered 429", True),
    ]


async def test_a_delivery_that_is_cancelled_leaves_no_connection() -> None:
    async with endpoint() as it, sink_to(it) as sink:
        it.silent = True
        with anyio.move_on_after(0.1) as scope:
            await sink(event())
        assert scope.cancelled_caught
