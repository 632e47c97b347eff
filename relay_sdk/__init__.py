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

chunk_session.py    one run of the handlers for chunks of durable jobs: the pieces and their order
  chunk_claimer.py    claims (chunk_wants.py: for whom)        chunk_sweeper.py  tidies up behind others
  chunk_executor.py   runs handlers (chunk_ends.py: what an end is)
  chunk_watch.py      leases, timeouts and stops by the clock   chunk_heartbeat.py  renews leases
  chunk_completer.py  writes ends (chunk_writes.py: the statements; chunk_giveback.py: the last ones)
  chunk_progress.py   tells watchers
chunk_context.py    what a handler is given (chunk_transaction.py, chunk_row_errors.py, chunk_stopping.py)
chunk_slots.py      the chunks in hand       chunk_registry.py  the handlers
"""

from dispatch_core.durable_models import ChunkOutcome, JobLease
from dispatch_core.models import DispatchJob
from relay_sdk.chunk_context import ChunkContext
from relay_sdk.chunk_slots import StopReason
from relay_sdk.chunk_stopping import ChunkStopped
from relay_sdk.metrics import Health, RelayMetrics
from relay_sdk.outcomes import Reject, Reply, Retry, Snooze
from relay_sdk.relay import Relay
from relay_sdk.runner import run_relays
from relay_sdk.settings import RelaySettings

__all__ = [
    "ChunkContext",
    "ChunkOutcome",
    "ChunkStopped",
    "DispatchJob",
    "Health",
    "JobLease",
    "Reject",
    "Relay",
    "RelayMetrics",
    "RelaySettings",
    "Reply",
    "Retry",
    "Snooze",
    "StopReason",
    "run_relays",
]
