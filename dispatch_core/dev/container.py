"""A development server in a container, by testcontainers, where Docker answers."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping
from typing import Any

from dispatch_core.errors import ConfigurationError

__all__ = ["ContainerServer", "docker_problem"]

DEFAULT_IMAGE = "postgres:18"


def docker_problem() -> str | None:
    """Say why no container can be started here; None when one can."""
    with warnings.catch_warnings():
        # Docker's client leaks its socket where nobody answers; left alone, some later test would get the warning.
        warnings.simplefilter("ignore", ResourceWarning)
        problem = _ask_docker()
        gc.collect()
    return problem


def _ask_docker() -> str | None:
    try:
        import docker
        import testcontainers.community.postgres  # noqa: F401 - is it there?
    except ImportError as error:
        return f"testcontainers 4.15 or newer is not installed ({error.name} is missing)"
    try:
        client = docker.from_env(timeout=10)
        try:
            client.ping()
        finally:
            client.close()
    except Exception as error:  # whatever Docker's client says, it is a reason and no more
        return f"Docker does not answer ({str(error)[:120]})"
    return None


class ContainerServer:
    """One container; its host port is chosen by us, since Docker would give another after each restart."""

    def __init__(self, *, port: int, password: str, settings: Mapping[str, str], image: str = DEFAULT_IMAGE) -> None:
        if (problem := docker_problem()) is not None:
            raise ConfigurationError(f"No PostgreSQL container: {problem}.")
        from testcontainers.community.postgres import PostgresContainer

        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._container: Any = (
            PostgresContainer(image, username="postgres", password=password, dbname="postgres", driver=None)
            .with_bind_ports(5432, port)
            .with_command(["postgres", *arguments])
        )
        self._container.start()
        self.host: str = self._container.get_container_host_ip()
        self.port = port

    def start(self) -> None:
        """Start the stopped container again and wait until it answers."""
        self._container.get_wrapped_container().start()
        self._container._connect()

    def stop(self, mode: str) -> None:
        """Stop PostgreSQL; the container and its data stay."""
        container = self._container.get_wrapped_container()
        # The server's own signals: SIGINT is a fast shutdown, SIGQUIT an immediate one.
        container.kill(signal="SIGQUIT" if mode == "immediate" else "SIGINT")
        container.wait(timeout=60)

    def remove(self) -> None:
        """Remove the container and its data."""
        self._container.stop()
