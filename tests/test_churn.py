"""What comes and goes leaves nothing behind: a short churn, counted exactly. The long one is `make churn`."""

from __future__ import annotations

from tests.chaos.churn import Churn, Place
from tests.chaos.footprint import Counts, count
from tests.conftest import Connection
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually


async def test_of_what_comes_and_goes_no_task_descriptor_or_session_is_left(
    database: TestDatabase, admin: Connection, seed: int
) -> None:
    async def same_as(counts: Counts) -> bool:
        # What an act has left behind ends by itself a moment later, as a session on the server does, or not at all.
        assert await count(admin) == counts
        return True

    before = await count(admin)
    async with Churn(Place.of(database), seed).opened() as churn:
        # One that takes three seconds, because nobody answers a good-bye.
        await churn.round(at_once=20, without="client_on_a_dead_network")
        await churn.rest()
        between = await count(admin)
        await churn.round(at_once=20)
        await churn.rest()
        await eventually(lambda: same_as(between))
        assert sum(churn.done.values()) == 25
        assert churn.met.keys() >= {"S2R-CLIENT-CLOSED", "S2R-WAIT-TIMEOUT", "S2R-JOB-UNKNOWN"}
    await eventually(lambda: same_as(before))
