"""What the driver leaves undone where it is cancelled. Of another version of it without these names only this is lost.

Before a connection is encrypted, the driver asks the server whether it may be, by a protocol object with a future for
the answer. One that is cancelled after this object was made and before anybody waits for the future closes its socket,
by which the future fails: nobody ever looks at it, and the event loop logs `Future exception was never retrieved`.
Connections are cancelled at such moments by every timeout and by every stop; and those on which the driver sends a
cancel request, in a task of its own, whenever the connection that they are for is cut.
"""

from __future__ import annotations

from typing import Any

from asyncpg import connect_utils

__all__ = ["look_at_failed_upgrades"]


def look_at_failed_upgrades() -> None:
    """Have the driver's protocol look at its future itself when it fails; whoever waits for it is told as before.

    Idempotent: yes.
    """
    driver: Any = connect_utils
    upgrade: Any = getattr(driver, "TLSUpgradeProto", None)
    if upgrade is None or getattr(upgrade, "looks_at_failure", False):
        return

    class Upgrade(upgrade):  # type: ignore[misc]
        looks_at_failure = True

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            answer = getattr(self, "on_data", None)
            if answer is not None and answer.done() and not answer.cancelled():
                answer.exception()

    driver.TLSUpgradeProto = Upgrade
