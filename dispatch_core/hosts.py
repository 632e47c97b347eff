"""Which servers a DSN names, and which of them to ask first: for one that names several, of which one takes writes.

    postgresql://login@db1:5432,db2:5432/app?target_session_attrs=read-write

Only a hint is kept between tries: whoever took us last is asked first, so that a dead host costs one of a process's
connections its patience and not each. Nothing here speaks to a server.
"""

from __future__ import annotations

import re
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from dispatch_core.errors import ConfigurationError

__all__ = ["TARGETS", "Host", "accepted", "hosts_of", "ordered", "target_of"]

Host: TypeAlias = tuple[str, int]
"""Name or address, or directory of a Unix socket; and port."""

TARGETS: Final = ("read-write", "primary", "any")
"""Values of target_session_attrs that lead, or may lead, to a server that takes writes."""

_DEFAULT_PORT: Final = 5432
_BRACKETED: Final = re.compile(r"\[([^\]]+)\](?::(\d+))?")

_last: Final[dict[tuple[Host, ...], Host]] = {}
"""By all the hosts of a DSN: the one that took a connection last. One entry a DSN, for all its connections."""


def hosts_of(dsn: str) -> tuple[Host, ...]:
    """Return the hosts of a DSN that names several, in its order.

    Empty where it names one or none, or where it is not understood: then it is the driver's to make something of it.
    """
    try:
        parts = urlsplit(dsn)
        parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
        # As the driver has it: the login ends at the first @.
        login, at, hosts = parts.netloc.partition("@")
        named = [unquote(host) for host in (hosts if at else login).split(",") if host]
        named = named or [host for host in parameters.get("host", "").split(",") if host]
        if len(named) < 2:
            return ()
        ports = [int(port) for port in parameters.get("port", "").split(",") if port] or [_DEFAULT_PORT]
        if len(ports) == 1:
            ports *= len(named)
        return tuple(_host(host, port) for host, port in zip(named, ports, strict=True))
    except ValueError:
        return ()


def _host(text: str, port: int) -> Host:
    if text.startswith("/"):
        return text, port
    if text.startswith("["):
        match = _BRACKETED.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return match[1], int(match[2] or port)
    name, _, own = text.partition(":")
    return name, int(own or port)


def target_of(dsn: str) -> str | None:
    """Return which kind of server a DSN asks for; None where it does not say.

    Raises: ConfigurationError for one that is no target of ours, because everything here writes, LISTEN included.
    """
    try:
        target = dict(parse_qsl(urlsplit(dsn).query, keep_blank_values=True)).get("target_session_attrs")
    except ValueError:
        return None  # no DSN at all, as whoever uses it will say
    if target is not None and target not in TARGETS:
        raise ConfigurationError(
            f"target_session_attrs in the DSN must be one of {', '.join(TARGETS)}: a standby takes no work"
        )
    return target


def ordered(hosts: tuple[Host, ...]) -> list[Host]:
    """Return the hosts in the order in which to ask them: whoever took us last, then as they are written."""
    last = _last.get(hosts)
    return sorted(hosts, key=lambda host: host != last)


def accepted(hosts: tuple[Host, ...], host: Host) -> None:
    """Note that `host` has taken a connection."""
    _last[hosts] = host
