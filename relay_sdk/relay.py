"""The relay: what a program makes, gives its handlers to, and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

from dispatch_core.codec import check_name
from dispatch_core.errors import ConfigurationError, HandlerRegistrationError
from dispatch_core.ids import new_instance_id
from dispatch_core.settings import CoreSettings, DurableJobsSettings
from relay_sdk.chunk_registry import ChunkRegistry
from relay_sdk.chunk_session import ChunkSession
from relay_sdk.metrics import Health, RelayMetrics, joint_health
from relay_sdk.registry import Registry
from relay_sdk.runner import Working, main, run_relays
from relay_sdk.session import Session
from relay_sdk.settings import RelaySettings

__all__ = ["Relay"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Relay:
    """One destination for jobs, of one or several tenants, served by this process and any number of others.

    relay = Relay("erp-emea", tenants=["acme"], dsn=dsn)

    @relay.handler("GetInvoice", timeout=20, concurrency=50)
    async def get_invoice(job: DispatchJob) -> Reply: ...

    @relay.chunk_handler("import-customers", concurrency=4)
    async def import_customers(ctx: ChunkContext) -> None: ...

    relay.main()                # or: await relay.run()
    """

    def __init__(
        self,
        relay_id: str,
        *,
        tenants: Iterable[str],
        dsn: str | None = None,
        listen_dsn: str | None = None,
        pool: Any = None,
        settings: RelaySettings | None = None,
        core: CoreSettings | None = None,
        durable: DurableJobsSettings | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Take the tenants whose jobs are to be claimed; nothing is opened before `run`.

        `dsn` and `listen_dsn` (PostgreSQL directly, where a pooler stands before it) come before `core`, which by
        default is read from ``RELAY_DISPATCH_…``; `settings` by default from ``RELAY_…``; `concurrency` comes before
        it; `durable`, which is for chunk handlers alone, from ``DURABLE_…``. `pool`: an asyncpg pool of the caller,
        used and left open; without any DSN there are then no wake-ups.

        Raises: InvalidNameError, ConfigurationError.
        """
        self.relay_id = check_name("relay_id", relay_id)
        if isinstance(tenants, (str, bytes)):
            raise ConfigurationError(f"tenants must be a list of tenant ids, not one: tenants=[{tenants!r}]")
        self.tenants = tuple(dict.fromkeys(check_name("tenant", tenant) for tenant in tenants))
        if not self.tenants:
            raise ConfigurationError("a relay needs at least one tenant")
        self.core = core or CoreSettings.load()
        if dsn is not None or listen_dsn is not None:
            given = {"dsn": dsn, "listen_dsn": listen_dsn}
            # A listen_dsn of the environment belongs to the dsn of the environment.
            base = self.core.model_dump(exclude={"dsn", "listen_dsn"} if dsn else {"listen_dsn"})
            self.core = CoreSettings.load(**{**base, **given})
        self.settings = settings or RelaySettings.load()
        if concurrency is not None:
            self.settings = RelaySettings.load(**{**self.settings.model_dump(), "concurrency": concurrency})
        self.pool = pool
        self.durable = durable
        self.metrics = RelayMetrics()
        self._registry = Registry()
        self._chunks = ChunkRegistry()
        self._instance_id: str | None = None
        self._session: Session | None = None
        self._chunk_session: ChunkSession | None = None
        self._stops_first: tuple[float | None] | None = None
        """The grace of a stop that came before the run it is for."""
        self._has_run = False
        """Whether a run has ended well, after which a stop is for none."""

    # --- handlers ---

    def handler(
        self, operation: str, *, timeout: float | None = None, concurrency: int | None = None
    ) -> Callable[[Function], Function]:
        """Register the decorated function for `operation`: ``async def``, or ``def``, which runs in a thread.

        It takes the job and returns (or raises) `Reply`, `Reject`, `Retry`, `Snooze`, or None for an empty reply. An
        attempt is cancelled after `timeout` seconds, and then treated as an error of the handler. At most
        `concurrency` of them run at once in this relay.

        Raises: HandlerRegistrationError, when applied.
        """
        if callable(operation):
            # `@relay.handler` alone would put the function's name to an object that is never called.
            raise HandlerRegistrationError(
                'write @relay.handler("Operation"): a handler is registered for an operation'
            )

        def register(function: Function) -> Function:
            return self._registry.add(operation, function, timeout=timeout, concurrency=concurrency)

        return register

    def chunk_handler(
        self, kind: str, *, timeout: float | None = None, concurrency: int | None = None
    ) -> Callable[[Function], Function]:
        """Register the decorated ``async def`` function for chunks of durable jobs of `kind`.

        It takes a `ChunkContext`. What it returns, any JSON value or a `ChunkOutcome`, is the chunk's outcome; it may
        raise `Retry` or `Reject`; any other error is a failed attempt. An attempt is cancelled after `timeout` seconds.
        At most `concurrency` of them run at once in this relay. Chunks are claimed of all jobs of the relay's tenants,
        whatever the relay's id.

        Raises: HandlerRegistrationError, when applied.
        """
        if callable(kind):
            raise HandlerRegistrationError(
                'write @relay.chunk_handler("kind"): a handler is registered for a kind of job'
            )

        def register(function: Function) -> Function:
            return self._chunks.add(kind, function, timeout=timeout, concurrency=concurrency)

        return register

    @overload
    def fallback(self, function: Function) -> Function: ...

    @overload
    def fallback(
        self, function: None = None, *, timeout: float | None = None, concurrency: int | None = None
    ) -> Callable[[Function], Function]: ...

    def fallback(self, function: Any = None, *, timeout: float | None = None, concurrency: int | None = None) -> Any:
        """Register the decorated function for every operation that has no handler. As `handler` otherwise."""
        if function is not None:
            return self._registry.add_fallback(function, timeout=timeout, concurrency=concurrency)
        return lambda decorated: self._registry.add_fallback(decorated, timeout=timeout, concurrency=concurrency)

    @property
    def operations(self) -> list[str]:
        """The operations that have a handler."""
        return self._registry.operations

    @property
    def has_handlers(self) -> bool:
        """Whether it has a handler for dispatch jobs, or a fallback."""
        return not self._registry.is_empty

    @property
    def chunk_kinds(self) -> list[str]:
        """The kinds of durable jobs that have a handler for their chunks."""
        return self._chunks.kinds

    # --- running ---

    async def run(self, *, drain: bool = False, install_signal_handlers: bool = False) -> None:
        """Work until `stop`, or with `drain` until the backlog is empty (what is soon to be tried again included).

        Cancelling it stops the relay without grace, but not without giving its jobs back. It returns within the grace
        period and three seconds of a stop, also when the database is down.

        Raises: ConfigurationError, DatabaseError, SchemaMismatchError, TenancyDeniedError, at the start; later the
        fault of a piece that died, and SystemExit or KeyboardInterrupt of a handler.
        """
        await run_relays([self], drain=drain, install_signal_handlers=install_signal_handlers)

    def main(self, *, drain: bool = False) -> None:
        """Run as a program: with an event loop of its own (uvloop, if installed), SIGTERM and SIGINT stop it.

        A second signal ends the grace period. Exits with 4 for a schema that does not fit, 5 for a database that is not
        reached, 1 for any other foreseeable error.

        Raises: ConfigurationError inside an event loop that runs.
        """
        main([self], drain=drain)

    def stop(self, *, grace_seconds: float | None = None) -> None:
        """Ask the relay to stop; returns at once. A second call can only make the grace period shorter.

        Where it does not run yet (a task that is to run it may not have had its turn), or not again after a run that
        failed, the next `run` returns at once and claims nothing. After a run that has ended well it does nothing.

        Call it in the event loop's thread. Idempotent: yes.
        """
        if not self._sessions and not self._has_run:
            self._stops_first = (grace_seconds,)
        for session in self._sessions:
            session.stop(grace_seconds)

    def health(self) -> Health:
        """Return how it is at this moment."""
        if not self._sessions:
            return Health("stopped", None, "stopped", "unknown", 0, 0, 0, None)
        return joint_health([session.health() for session in self._sessions])

    @property
    def instance_id(self) -> str | None:
        """The id under which it claims; new at every start, None while it does not run."""
        return self._instance_id

    def begin(self) -> Sequence[Working]:
        """Make a run of this relay; for `run_relays`."""
        if self._sessions:
            raise ConfigurationError(f"relay {self.relay_id} runs already")
        if self._registry.is_empty and self._chunks.is_empty:
            raise ConfigurationError(f"relay {self.relay_id} has no handler: every job would fail")
        # New at every start: a claim of a process that had the same host and pid before is not ours.
        self._instance_id = instance_id = new_instance_id(self.relay_id)
        common = (self.settings, self.metrics, instance_id)
        if not self._registry.is_empty:
            self._session = Session(self.relay_id, self.tenants, self._registry, *common)
        if not self._chunks.is_empty:
            durable = self.durable or DurableJobsSettings.load()
            self._chunk_session = ChunkSession(self.relay_id, self.tenants, self._chunks, durable, *common)
        if self._stops_first is not None:
            for session in self._sessions:
                session.stop(*self._stops_first)
        return self._sessions

    def ended(self, *, failed: bool) -> None:
        """Note that its run is over; for `run_relays`."""
        self._session = self._chunk_session = None
        self._stops_first, self._has_run = None, not failed
        self._instance_id = None

    @property
    def _sessions(self) -> list[Session | ChunkSession]:
        return [session for session in (self._session, self._chunk_session) if session is not None]
