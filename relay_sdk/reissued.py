"""Know a claim again that the database has forgotten and given to this very process anew.

After an asynchronous failover the new primary may not know of the last claims of the old one. Whoever claims next gets
those jobs, with the very fence that they had: it is one higher than what the new primary knows. Where that is another
process, its instance id tells the two claims apart. Where it is this one, nothing does: the two would be one claim with
two handlers, and the database would accept the end of either. So a job that is in hand under the same fence is not
started a second time: the handler that runs is the claim's.

Only what was in hand when a connection was opened can be met so, over that connection; else nothing is looked at.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from uuid import UUID

from dispatch_core.models import ClaimedJobs, DispatchJob
from relay_sdk.slots import ENDED, Cause, Slot, Slots

__all__ = ["Reissued"]

logger = logging.getLogger(__name__)


class Reissued:
    """Keep what is in hand already out of what was claimed."""

    def __init__(self, slots: Slots, opened: Callable[[], int]) -> None:
        """Take `opened()`, which counts the connections that were opened."""
        self._slots = slots
        self._opened = opened
        self._seen = 0
        self._before: dict[UUID, Slot] = {}
        """What was in hand when it was last seen that one was opened, and still is."""

    def without(self, claimed: ClaimedJobs, sent_at: float) -> ClaimedJobs:
        """Return what is to be started of a claim that was sent at `sent_at`; the leases of the rest begin anew."""
        seen = self._opened()
        if seen != self._seen:
            self._seen = seen
            self._before = {slot.job.job_id: slot for slot in self._slots}
        if not self._before or not claimed.jobs:
            return claimed
        self._before = {job_id: slot for job_id, slot in self._before.items() if slot in self._slots}
        new = [job for job in claimed.jobs if not self._is_in_hand(job, sent_at)]
        if len(new) == len(claimed.jobs):
            return claimed
        logger.warning(
            "%d jobs were claimed that this relay has in hand under the same fence: the database has lost their first "
            "claim, as in a failover; their handlers go on",
            len(claimed.jobs) - len(new),
        )
        return dataclasses.replace(claimed, jobs=new)

    def _is_in_hand(self, job: DispatchJob, sent_at: float) -> bool:
        slot = self._before.get(job.job_id)
        if slot is None or (slot.job.tenant_id, slot.job.fence) != (job.tenant_id, job.fence):
            return False
        if slot.cause is Cause.LOST or (slot.state is ENDED and slot.end is None):
            return False  # it writes nothing more
        slot.renewed_at = max(slot.renewed_at, sent_at)
        return True
