"""I5, looked at from outside: was a job that was ready stepped over by claims that took later ones?

A trigger has noted each change of a job's state, with the clock and the beginning of its transaction; when that was
committed, the server itself remembers. A claim may leave a job that it cannot see yet, that another transaction has
locked, or that lies below its cursor, which the relay notes. So a job was stepped over by a claim, without a reason, if

    it had been ready for `VISIBLE_SECONDS`, by the commit of the change that made it so,
    the transaction of its next change began after the claim had written, so that it held no lock before,
    its deadline had not passed (a poll of one that is late locks it too), the rig's own locks were not there, and
    it lies between the claim's cursor and the last job that was taken.

A transaction that locks and is then rolled back leaves no trace; but it does not last. So only a job is told of that
was stepped over again and again, for `AGAIN_SECONDS`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import UUID

from tests.chaos.evidence import Evidence, Move, Name

__all__ = ["stepped_over", "waiting"]

VISIBLE_SECONDS: Final = 2.0
"""From a commit's time, which is read before its flush, until every new snapshot has it."""
AGAIN_SECONDS: Final = 1.0

_Key: TypeAlias = tuple[int, UUID]
_Pair: TypeAlias = tuple[str, str]


@dataclass(slots=True)
class _Claim:
    """One claim of one tenant's jobs: when it looked, when it had written at the latest, and above what up to what."""

    claim_id: UUID
    at: float
    written: float
    after: int
    last: _Key


@dataclass(slots=True)
class Waiting:
    """A job that was ready and could be seen, from one moment to another, by the wall clock."""

    name: Name
    key: _Key
    since: float
    until: float


def waiting(e: Evidence) -> dict[_Pair, list[Waiting]]:
    """Return the jobs that had to wait for so long that claims must have seen them, by tenant and relay."""
    found: dict[_Pair, list[Waiting]] = defaultdict(list)
    for name, moves in e.moves_by_job().items():
        for move, following in zip(moves, [*moves[1:], None], strict=True):
            if move.state != "ready" or move.committed is None:
                continue
            until = move.expires_at if following is None else min(move.expires_at, following.began)
            if move.committed + VISIBLE_SECONDS < until:
                key = (move.seq, name[1])
                found[move.tenant, move.relay].append(Waiting(name, key, move.committed + VISIBLE_SECONDS, until))
    return found


def stepped_over(e: Evidence) -> Iterator[tuple[str, Name | None]]:
    claims = _claims(e)
    for pair, rows in waiting(e).items():
        some = claims.get(pair, [])
        moments = [claim.at for claim in some]
        for row in rows:
            by = [
                claim
                for claim in some[bisect_left(moments, row.since) : bisect_left(moments, row.until)]
                if claim.written < row.until and claim.after < row.key[0] and row.key < claim.last
            ]
            if by and by[-1].at - by[0].at >= AGAIN_SECONDS:
                seconds = by[-1].at - by[0].at
                yield f"ready, and stepped over by {len(by)} claims in {seconds:.1f} s: {by[0].claim_id} …", row.name


def _claims(e: Evidence) -> dict[_Pair, list[_Claim]]:
    cursors = {note.job_id: note.said["after"] for note in e.notes["cursor"]}
    groups: dict[tuple[str, str, UUID, float], list[Move]] = defaultdict(list)
    for move in e.moves:
        if move.state == "claimed" and move.claim_id is not None and move.claimed_at is not None:
            groups[move.tenant, move.relay, move.claim_id, move.claimed_at].append(move)
    found: dict[_Pair, list[_Claim]] = defaultdict(list)
    for (tenant, relay, claim_id, at), moves in groups.items():
        written = max(move.at for move in moves)
        if any(at < until and since < written for since, until in e.locked):
            continue
        after = cursors.get(claim_id, {}).get(tenant, 0)
        found[tenant, relay].append(_Claim(claim_id, at, written, after, max((one.seq, one.job_id) for one in moves)))
    for some in found.values():
        some.sort(key=lambda claim: claim.at)
    return found
