"""Which servers a DSN names, and which of them to ask first: for one that names several, of which one takes writes.

    postgresql://login@db1:5432,db2:5432/app?target_session_attrs=read-write

Only a hint is kept between tries: whoever took us last is asked first, so that a dead host costs one of a process's
connections its patience and not each. Nothing here speaks to a server.
"""

from __future__ import annotations

import re
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

__all__ = ["Host", "accepted", "hosts_of", "names_target", "ordered"]

Host: TypeAlias = tuple[str, int]
"""Name or address, or directory of a Unix socket; and port."""

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


def names_target(dsn: str) -> bool:
    """Tell whether a DSN says which kind of server it wants."""
    return "target_session_attrs" in dict(parse_qsl(urlsplit(dsn).query, keep_blank_values=True))


def ordered(hosts: tuple[Host, ...]) -> list[Host]:
    """Return the hosts in the order in which to ask them: whoever took us last, then as they are written."""
    last = _last.get(hosts)
    return sorted(hosts, key=lambda host: host != last)


def accepted(hosts: tuple[Host, ...], host: Host) -> None:
    """Note that `host` has taken a connection."""
    _last[hosts] = host
