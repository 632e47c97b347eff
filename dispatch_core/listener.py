"""Hear NOTIFY on one connection that is this process's own, and know when it does not.

NOTIFY is a hint and polling goes on always; what is kept here is that the hint comes whenever it can, and that nobody
believes to be listening who is not. `run` goes through these states, for ever:

    connecting    -> listening      the first connection is proven and every channel is listened to
    listening     -> degraded       the connection broke, was cut, or did not answer in time
    degraded      -> listening      a new one stands; all channels first, then one catch-up, then waiting
    any           -> polling_only   a transaction pooler is in the way; tried again rarely
    any           -> stopped        `run` was cancelled

**Order (C03).** Connect, LISTEN confirmed, then the catch-up: what was committed before the LISTEN is found by the
catch-up's read, what is committed after it rings.

**Proof (C01, C05).** A new session must have shown that it is ours alone and hears; then, every `probe_seconds`, it is
asked whether it still listens, and must answer within `probe_timeout_seconds`: the sum bounds how long deafness can
last unseen. How both is done is told in `listening_proof`.

**No subscription, no LISTEN.** Every ring wakes every listener of the database. So the channel of our own, on which the
first proof rings, is left as soon as that is over: a process that only rings, as a gateway does that waits for no
result, is then woken by nobody's rings.

**One backend.** After a reconnect the old session is ended on the server: where no FIN could reach it, it would stay
for hours and keep the notification queue from being cut.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, TypeAlias

import anyio
from anyio.abc import TaskStatus

from dispatch_core.backoff import Backoff
from dispatch_core.database import close_connection, connect, mapped_errors, takes_no_writes
from dispatch_core.errors import (
    ConfigurationError,
    ConnectionLostError,
    DatabaseUnavailableError,
    InvalidInputError,
    RelayDispatchError,
)
from dispatch_core.listening import MAX_NAME_BYTES, Echo, ListeningConnection
from dispatch_core.listening_proof import PoolerFound, end_predecessors, probe, prove, read_only
from dispatch_core.pacing import pace_of

__all__ = ["MAX_CHANNELS", "Listener", "ListenerState"]

logger = logging.getLogger(__name__)

ListenerState: TypeAlias = Literal["connecting", "listening", "degraded", "polling_only", "stopped"]

MAX_CHANNELS: Final = 1000
"""Each channel that a session listens on makes every ring of anybody dearer, so above this the rest is polled."""


class Listener:
    """Keep one listening connection for the process, and share it with the doorbell.

    Run `run` in the owner's task group. Call-backs are plain functions, called in the event loop; they must be quick,
    and one that raises is logged and harms no other.
    """

    def __init__(
        self,
        dsn: str,
        *,
        name: str = "",
        application_name: str = "relay-dispatch",
        connect_timeout: float = 10.0,
        probe_seconds: float = 5.0,
        probe_timeout_seconds: float = 3.0,
        backoff_base: float = 0.1,
        backoff_cap: float = 10.0,
        polling_only_retry_seconds: float = 300.0,
        max_channels: int = MAX_CHANNELS,
        dsn_setting: str = "RELAY_DISPATCH_LISTEN_DSN",
    ) -> None:
        """Take a DSN that leads to PostgreSQL itself, and `name`, which is added to what pg_stat_activity shows.

        `dsn_setting` is where a person sets that DSN. All times are seconds. A lost connection is noticed within
        ``probe_seconds + probe_timeout_seconds``.
        """
        self._dsn = dsn
        self._connect_timeout = connect_timeout
        self._probe_seconds = probe_seconds
        self._probe_timeout = probe_timeout_seconds
        self._backoff = Backoff(backoff_base, backoff_cap)
        self._pooler_retry = polling_only_retry_seconds
        self._max_channels = max_channels
        self._dsn_setting = dsn_setting
        # The random part tells this listener's sessions from any other's, so that only its own leftovers are ended.
        token = secrets.token_hex(4)
        self.application_name: str = f"{application_name} listener {token} {name}".strip()[:MAX_NAME_BYTES]
        self._echo = Echo(probe_timeout_seconds)

        self._callbacks: dict[str, list[Callable[[str], None]]] = {}
        self._catch_up_callbacks: list[Callable[[], None]] = []
        self._state_callbacks: list[Callable[[ListenerState], None]] = []
        self._round_trip_callbacks: list[Callable[[float], None]] = []

        self._conn: ListeningConnection | None = None
        self._any_conn: ListeningConnection | None = None
        """The same, also before it is proven and while it is put away."""
        self._lock = anyio.Lock()
        self._active: set[str] = set()
        self._wakeup = anyio.Event()
        self._dirty = False
        self._synced = anyio.Event()
        self._warned_of_channels = False
        self._left_behind = False

        self.state: ListenerState = "connecting"
        self.last_error: RelayDispatchError | None = None
        """Why it is not listening; None while it is."""
        self.backend_pid: int | None = None
        """The server's process id of the session, while listening."""
        self.notifications = 0
        """How many notifications were handed to call-backs."""
        self.connects = 0
        """How many connections came to listen; one less is how many were lost."""

    # --- subscriptions ---

    async def subscribe(self, channel: str, callback: Callable[[str], None]) -> bool:
        """Call `callback(payload)` for every notification on `channel` (made by ``relay.channel``).

        Returns True when LISTEN is confirmed: read the table *after* that (C03). False when there is no connection now,
        or too many channels: the subscription is kept, a catch-up call-back follows when it stands, and until then only
        polling finds the work. Never waits for a server that is away. Cancelled, it leaves no subscription.

        Raises: InvalidInputError for a name above 63 bytes.
        """
        if not channel or len(channel.encode()) > MAX_NAME_BYTES or "\0" in channel:
            raise InvalidInputError(f"a channel name must have 1 to {MAX_NAME_BYTES} bytes")
        self._callbacks.setdefault(channel, []).append(callback)
        if channel not in self._active:
            # Also where there is no connection yet: one may be in the middle of sending its first LISTEN.
            synced = self._synced
            self._mark_dirty()
            if self.state == "listening":
                try:
                    await synced.wait()
                except BaseException:
                    # Cancelled: the caller never learns that it has something to take back.
                    self.unsubscribe(channel, callback)
                    raise
        return channel in self._active

    def unsubscribe(self, channel: str, callback: Callable[[str], None]) -> None:
        """Stop calling `callback`; UNLISTEN follows when it was the channel's last. Idempotent: yes."""
        callbacks = self._callbacks.get(channel)
        if callbacks is None or callback not in callbacks:
            return
        # A new list: the old one may be walked just now.
        self._callbacks[channel] = callbacks = list(callbacks)
        callbacks.remove(callback)
        if not callbacks:
            del self._callbacks[channel]
            self._mark_dirty()

    def is_listening_to(self, channel: str) -> bool:
        """Tell whether LISTEN is confirmed for `channel` on the present connection."""
        return channel in self._active

    def on_catch_up(self, callback: Callable[[], None]) -> None:
        """Call `callback()` each time after all channels stand on a new connection: read once what was missed."""
        self._catch_up_callbacks.append(callback)

    def on_state_change(self, callback: Callable[[ListenerState], None]) -> None:
        """Call `callback(state)` at each change of `state`."""
        self._state_callbacks.append(callback)

    def on_round_trip(self, callback: Callable[[float], None]) -> None:
        """Call `callback(seconds)` with the time that each proof has taken: a statement that reads nothing."""
        self._round_trip_callbacks.append(callback)

    async def execute(self, sql: str, *args: object) -> list[Any]:
        """Run one statement on the listening connection, in turn with its own; returns the rows.

        Raises: DatabaseUnavailableError at once where there is no connection; as `mapped_errors`.
        """
        if self.state != "listening":
            raise DatabaseUnavailableError("there is no listening connection now")
        async with self._lock:
            conn = self._conn
            if conn is None:
                raise DatabaseUnavailableError("the listening connection was lost")
            try:
                with mapped_errors():
                    rows: list[Any] = await conn.fetch(sql, *args, timeout=self._probe_seconds + self._probe_timeout)
                if takes_no_writes(conn):
                    raise read_only()  # a ring that nobody hears
                return rows
            except DatabaseUnavailableError as error:
                self._lose(conn, error)
                conn.terminate()  # `run` is told by the termination call-back, and connects anew
                raise

    def terminate(self) -> None:
        """Cut the connection at once, without a polite end, for an owner that must leave although the network is dead;
        also one that is just being put away.

        `run` connects anew, unless it is cancelled. Idempotent: yes.
        """
        if self._any_conn is not None:
            self._any_conn.terminate()

    # --- the connection ---

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep listening until cancelled; `started` when the first try has ended, well or not.

        Never raises for what the database or the network does.

        Raises: ConfigurationError for a DSN that is none.
        """
        started = False
        # Kept as long as this runs, so that the tries of now are spaced by those of before.
        pace = pace_of(self._dsn)

        def first_try_is_over() -> None:
            nonlocal started
            if not started:
                started = True
                task_status.started()

        try:
            while True:
                try:
                    await self._listen_until_lost(first_try_is_over)
                except ConfigurationError:
                    raise
                except PoolerFound:
                    self._become("polling_only", None)
                    delay = self._pooler_retry * random.uniform(0.5, 1.0)
                except RelayDispatchError as error:
                    if self.state != "polling_only":
                        self._become("degraded", error)
                    delay = self._backoff.next()
                first_try_is_over()
                with anyio.move_on_after(delay):
                    await pace.until_open()  # somebody else of this process has found the server back
        finally:
            self._become("stopped", None)

    async def _listen_until_lost(self, first_try_is_over: Callable[[], None]) -> None:
        conn = self._any_conn = await self._connect()
        try:
            conn.add_termination_listener(self._on_termination)
            self.backend_pid = await prove(conn, self._echo, self._on_notification, self._connect)
            if self._left_behind:
                await end_predecessors(conn, self.application_name)
                self._left_behind = False
            self._conn = conn
            # Nobody has subscribed to it, so it is left, once all channels that are wanted stand.
            self._active.add(self._echo.channel)
            await self._sync(conn)
            self.connects += 1
            self._become("listening", None)
            first_try_is_over()
            self._call(self._catch_up_callbacks)
            await self._watch(conn)
        except DatabaseUnavailableError:
            # No polite end on a line that may be dead: it would take its whole timeout.
            self._left_behind = True
            conn.terminate()
            raise
        finally:
            self._conn = None
            self.backend_pid = None
            self._active.clear()
            self._release_subscribers()
            await close_connection(conn)
            self._any_conn = None

    async def _connect(self) -> ListeningConnection:
        conn = await connect(
            self._dsn,
            connect_timeout=self._connect_timeout,
            command_timeout=self._probe_timeout,
            application_name=self.application_name,
            connection_class=ListeningConnection,
        )
        assert isinstance(conn, ListeningConnection)
        return conn

    async def _watch(self, conn: ListeningConnection) -> None:
        """Keep subscriptions in step and prove the session, until it is lost, which raises."""
        next_probe = anyio.current_time() + self._probe_seconds
        while True:
            with anyio.move_on_at(next_probe):
                await self._wakeup.wait()
            self._wakeup = anyio.Event()
            if conn.is_closed():
                raise ConnectionLostError("the listening connection was closed")
            if self._dirty:
                await self._sync(conn)
            if anyio.current_time() >= next_probe:
                await self._probe(conn)
                # Only a connection that has lasted for a while is a success: one that is killed at once must back off.
                self._backoff.reset()
                next_probe = anyio.current_time() + self._probe_seconds

    async def _probe(self, conn: ListeningConnection) -> None:
        async with self._lock:
            # Whoever took one channel away took them all: a pooler's reset does.
            channel = next(iter(self._active), None)
            sent_at = time.monotonic()
            await probe(conn, self.backend_pid, channel)
            took = time.monotonic() - sent_at
        self._call(self._round_trip_callbacks, took)

    # --- keeping LISTEN in step with the subscriptions ---

    def _mark_dirty(self) -> None:
        self._dirty = True
        self._wakeup.set()

    async def _sync(self, conn: ListeningConnection) -> None:
        """LISTEN and UNLISTEN until the session has what is wanted, also where that changes meanwhile."""
        while True:
            self._dirty = False
            synced, self._synced = self._synced, anyio.Event()
            try:
                wanted = self._wanted()
                missing, surplus = wanted - self._active, self._active - wanted
                if missing or surplus:
                    async with self._lock:
                        with mapped_errors():
                            if missing:
                                await conn.listen(missing, self._on_notification)
                                self._active |= missing
                            if surplus:
                                self._active -= surplus
                                await conn.unlisten(surplus, self._on_notification)
            finally:
                synced.set()
            if not self._dirty:
                return

    def _wanted(self) -> set[str]:
        if len(self._callbacks) <= self._max_channels:
            self._warned_of_channels = False
            return set(self._callbacks)
        if not self._warned_of_channels:
            self._warned_of_channels = True
            logger.warning(
                "%d channels are wanted and %d listened to: the others are polled",
                len(self._callbacks),
                self._max_channels,
            )
        return set(list(self._callbacks)[: self._max_channels])

    def _release_subscribers(self) -> None:
        self._dirty = False
        self._synced.set()
        self._synced = anyio.Event()

    # --- what comes from asyncpg, in the event loop ---

    def _on_notification(self, _conn: object, pid: int, channel: str, payload: str) -> None:
        if channel == self._echo.channel:
            self._echo.arrived(pid, payload)
            return
        self.notifications += 1
        self._call(self._callbacks.get(channel, ()), payload)

    def _on_termination(self, conn: object) -> None:
        self._lose(conn, ConnectionLostError("the listening connection was closed"))
        self._wakeup.set()

    def _lose(self, conn: object, error: RelayDispatchError) -> None:
        """Say at once that `conn` is gone, before `run` gets its turn to do something about it."""
        if self._conn is not conn:
            return
        self._conn = None
        self._active.clear()
        if self.state == "listening":
            self._become("degraded", error)

    # --- telling others ---

    def _become(self, state: ListenerState, error: RelayDispatchError | None) -> None:
        self.last_error = error
        before, self.state = self.state, state
        if before == state:
            if error is not None:
                logger.debug("still no listening connection: %s", error)
            return
        if state == "degraded":
            logger.warning("no listening connection, polling until there is one again: %s", error)
        elif state == "polling_only":
            logger.warning(
                "notifications do not arrive on the listening connection: a transaction pooler stands before "
                "PostgreSQL. Polling only, so wake-ups take up to the poll interval; "
                "set %s to a direct address of the server",
                self._dsn_setting,
            )
        elif state == "listening" and before != "connecting":
            logger.info("listening again")
        self._call(self._state_callbacks, state)

    def _call(self, callbacks: Iterable[Callable[..., None]], *args: object) -> None:
        for callback in list(callbacks):
            try:
                callback(*args)
            except Exception:
                logger.exception("a call-back of the listener failed")
