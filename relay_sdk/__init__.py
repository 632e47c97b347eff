"""The relay's side of Relay Dispatch: claim work, run its handler, complete it once.

relay.py      Relay: what a program makes, gives its handlers to, and runs
runner.py     several relays in one process, signals, `main`          connections.py  what they share
session.py    one run of one relay: the pieces and their order
  claimer.py    claims for free slots (cursor.py: where a claim begins)
  executor.py   runs handlers (ends.py: what an end is; deadlines.py: when it is over)
  completer.py  writes ends in batches (giveback.py: the last write of a relay that stops)
  heartbeat.py  renews leases        sweeper.py  tidies up behind others
slots.py      the jobs in hand       registry.py  the handlers
outcomes.py   Reply, Reject, Retry, Snooze          settings.py  metrics.py
"""

from dispatch_core.models import DispatchJob
from relay_sdk.metrics import Health, RelayMetrics
from relay_sdk.outcomes import Reject, Reply, Retry, Snooze
from relay_sdk.relay import Relay
from relay_sdk.runner import run_relays
from relay_sdk.settings import RelaySettings

__all__ = [
    "DispatchJob",
    "Health",
    "Reject",
    "Relay",
    "RelayMetrics",
    "RelaySettings",
    "Reply",
    "Retry",
    "Snooze",
    "run_relays",
]
