"""What is refused when a handler is registered or a relay is made, before anything runs."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from dispatch_core.errors import ConfigurationError, HandlerRegistrationError, InvalidDeadlineError, InvalidNameError
from relay_sdk import Relay, RelaySettings, Retry, Snooze, run_relays

DSN = "postgresql://nobody@127.0.0.1:1/none"


def _relay(**options: Any) -> Relay:
    return Relay("erp", tenants=["acme"], dsn=DSN, **options)


async def _good(job: Any) -> None: ...


class _Callable:
    async def __call__(self, job: Any) -> None: ...

    async def method(self, job: Any, *, option: int = 1) -> None: ...


def _plain(job: Any, more: int = 0) -> None: ...


async def _two(job: Any, other: Any) -> None: ...


async def _none() -> None: ...


async def _keyword(*, job: Any) -> None: ...


def _generator(job: Any) -> Any:
    yield job


async def _async_generator(job: Any) -> Any:
    yield job


@pytest.mark.parametrize(
    ("function", "is_async"),
    [
        (_good, True),
        (_plain, False),
        (_Callable(), True),
        (_Callable().method, True),
        (functools.partial(_two, other=1), True),
        (functools.partial(_plain, more=1), False),
        (lambda job: None, False),
    ],
)
def test_a_function_of_one_argument_is_a_handler(function: Any, is_async: bool) -> None:
    relay = _relay()
    assert relay.handler("Do")(function) is function
    handler = relay._registry.find("Do")
    assert handler is not None
    assert handler.is_async is is_async


@pytest.mark.parametrize(
    "function",
    [_two, _none, _keyword, _generator, _async_generator, "name", None, 7, _Callable, functools.partial(_good, 1)],
)
def test_a_wrong_signature_is_refused_at_registration(function: Any) -> None:
    with pytest.raises(HandlerRegistrationError):
        _relay().handler("Do")(function)
    if function is not None:
        with pytest.raises(HandlerRegistrationError):
            _relay().fallback(function)


def test_two_handlers_for_one_operation_are_refused() -> None:
    relay = _relay()
    relay.handler("Do")(_good)
    with pytest.raises(HandlerRegistrationError, match="has a handler already"):
        relay.handler("Do")(_plain)
    relay.fallback(_good)
    with pytest.raises(HandlerRegistrationError, match="there is a fallback already"):
        relay.fallback(concurrency=2)(_plain)
    assert relay.operations == ["Do"]


@pytest.mark.parametrize(
    "options",
    [
        *({"timeout": value} for value in (0, -1, float("inf"), True, "5")),
        *({"concurrency": value} for value in (0, 1.5, True)),
    ],
)
def test_a_limit_that_is_none_is_refused(options: Any) -> None:
    with pytest.raises(HandlerRegistrationError):
        _relay().handler("Do", **options)(_good)


@pytest.mark.parametrize("operation", ["", "x" * 201, "a\0b", "\ud800", 7, None])
def test_an_operation_that_no_job_can_have_is_refused(operation: Any) -> None:
    with pytest.raises(HandlerRegistrationError):
        _relay().handler(operation)(_good)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b", "\ud800", 7, None])
def test_bad_names_are_refused_when_a_relay_is_made(name: Any) -> None:
    with pytest.raises(InvalidNameError):
        Relay(name, tenants=["acme"], dsn=DSN)
    with pytest.raises(InvalidNameError):
        Relay("erp", tenants=["acme", name], dsn=DSN)


@pytest.mark.parametrize("tenants", ["acme", b"acme", [], ()])
def test_tenants_must_be_a_list_with_something_in_it(tenants: Any) -> None:
    with pytest.raises(ConfigurationError):
        Relay("erp", tenants=tenants, dsn=DSN)


def test_each_tenant_counts_once() -> None:
    assert Relay("erp", tenants=["b", "a", "b"], dsn=DSN).tenants == ("b", "a")


async def test_a_relay_without_handlers_or_without_a_dsn_does_not_run() -> None:
    with pytest.raises(ConfigurationError, match="no handler"):
        await _relay().run()
    relay = Relay("erp", tenants=["acme"])
    relay.fallback(_good)
    with pytest.raises(ConfigurationError, match="no DSN"):
        await relay.run()
    with pytest.raises(ConfigurationError, match="runs already"):
        await run_relays([relay, relay])
    assert relay.health().status == "stopped"


def test_settings_of_a_lease_that_no_heartbeat_can_keep_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="heartbeat_seconds"):
        RelaySettings.load(lease_seconds=10, heartbeat_seconds=6)
    assert RelaySettings.load(lease_seconds=12).heartbeat_interval_seconds == 4


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_CONCURRENCY", "7")
    monkeypatch.setenv("RELAY_LEASE_SECONDS", "12")
    monkeypatch.setenv("RELAY_DISPATCH_DSN", DSN)
    relay = Relay("erp", tenants=["acme"])
    assert (relay.settings.concurrency, relay.settings.lease_seconds) == (7, 12)
    assert relay.core.require_dsn() == DSN
    assert Relay("erp", tenants=["acme"], concurrency=9).settings.concurrency == 9


@pytest.mark.parametrize("after", [-1, float("nan"), float("inf"), 8 * 86400, "1", True])
def test_a_delay_that_is_none_is_refused_where_it_is_made(after: Any) -> None:
    with pytest.raises(InvalidDeadlineError):
        Retry(after=after)
    with pytest.raises(InvalidDeadlineError):
        Snooze(after)


def test_a_handler_without_an_operation_is_refused_where_it_stands() -> None:
    function: Any = _good  # as in `@relay.handler` above `async def _good`
    with pytest.raises(HandlerRegistrationError, match=r'write @relay\.handler\("Operation"\)'):
        _relay().handler(function)


async def test_main_within_a_running_loop_says_what_to_use_instead() -> None:
    with pytest.raises(ConfigurationError, match=r"await relay\.run\(\)"):
        _relay().main()
