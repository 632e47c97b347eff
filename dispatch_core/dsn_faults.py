"""Say what is wrong with a DSN, or with the way to the servers that it names, without a word of its password.

Where an unescaped @ or / has split a password, its rest stands where the driver looks for a host, a port or a database,
and the driver's own message quotes that. So these messages are ours, and name the hosts only where nothing else can be
among them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import asyncpg

from dispatch_core.errors import ConfigurationError, DatabaseUnavailableError

__all__ = ["cause", "dsn_faults"]

_ENCODE: Final = "@ : / ? # in user, password and database must be percent-encoded (%40 %3A %2F %3F %23)"
_SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")


@contextmanager
def dsn_faults(dsn: str) -> Iterator[None]:
    """Raise ours for what connecting by this DSN raises besides the driver's own errors.

    Raises: ConfigurationError for a DSN that cannot be used; DatabaseUnavailableError for a server out of reach.
    """
    try:
        yield
    except ConfigurationError:
        raise  # it is a ValueError too
    except (ValueError, OverflowError) as error:
        raise _unusable(dsn, error) from None
    except (OSError, EOFError) as error:
        raise _unreached(dsn, error) from error


def _unusable(dsn: str, error: Exception) -> ConfigurationError:
    if isinstance(error, asyncpg.exceptions.ClientConfigurationError) and "scheme" in str(error):
        return ConfigurationError("the DSN must begin with postgresql:// or postgres://")
    hosts = _hosts(dsn)
    whole = ConfigurationError(
        f"the DSN cannot be used: a host, a port or a parameter in it is not valid, or {_ENCODE}"
    )
    if hosts is None:
        return whole if "[" in dsn else ConfigurationError(f"the DSN cannot be used: {_ENCODE}")
    parameters = dict(parse_qsl(urlsplit(dsn).query, keep_blank_values=True))
    if parameters.get("sslmode", "prefer") not in _SSL_MODES:
        return ConfigurationError(f"sslmode in the DSN must be one of {', '.join(_SSL_MODES)}")
    ports = [host.rpartition("]")[2].partition(":")[2] for host in hosts.split(",")]
    ports += parameters.get("port", "").split(",")
    if not all(port == "" or (port.isdecimal() and int(port) < 2**16) for port in ports):
        return ConfigurationError("the port in the DSN must be a number below 65536")
    return whole


def _unreached(dsn: str, error: OSError | EOFError) -> DatabaseUnavailableError:
    hosts = _hosts(dsn)
    late = isinstance(error, TimeoutError) and error.errno is None
    how = " in time" if late else f": {cause(error)}"
    if hosts is None:
        return DatabaseUnavailableError(
            f"PostgreSQL could not be reached{how}; the host in the DSN looks wrong: {_ENCODE}"
        )
    return DatabaseUnavailableError(f"PostgreSQL could not be reached{f' at {hosts}' if hosts else ''}{how}")


def cause(error: Exception) -> str:
    """Return what the system says of an error, without the address, which the event loop repeats in its own text."""
    number = getattr(error, "errno", None) or 0
    # Those below zero are of the name lookup, and unknown to strerror.
    return os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)


def _hosts(dsn: str) -> str | None:
    """Return the hosts and ports of a DSN as they are written there; None where a password may have got among them."""
    try:
        parts = urlsplit(dsn)
    except ValueError:
        return None
    credentials, _, hosts = parts.netloc.rpartition("@")
    # asyncpg ends the password at the first @, and everybody ends the address at the first of / ? #.
    if "@" in credentials or "@" in parts.path + parts.query + parts.fragment:
        return None
    parameters = dict(parse_qsl(parts.query))
    hosts = hosts or parameters.get("host", "")
    if hosts and ":" not in hosts.rpartition("]")[2]:
        hosts += f":{parameters['port']}" if "port" in parameters else " (default port)"
    return hosts
