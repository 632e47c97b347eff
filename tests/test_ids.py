"""Ids that clients make."""

from __future__ import annotations

import multiprocessing
import uuid

from dispatch_core.codec import check_name
from dispatch_core.ids import new_id, new_instance_id


def test_ids_are_ascending_uuids_of_version_7() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert {type(one) for one in ids} == {uuid.UUID}
    assert {one.version for one in ids} == {7}
    assert ids == sorted(set(ids))


def _make_ids(count: int) -> list[uuid.UUID]:
    return [new_id() for _ in range(count)]


def test_forked_processes_make_different_ids() -> None:
    new_id()  # the state that a fork would copy
    with multiprocessing.get_context("fork").Pool(4) as pool:
        ids = [one for part in pool.map(_make_ids, [500] * 8, chunksize=1) for one in part]
    assert len(set(ids)) == 4000


def test_an_instance_id_is_new_at_every_start_and_a_valid_name() -> None:
    first, second = new_instance_id("erp"), new_instance_id("erp")
    assert first != second
    assert first.startswith("erp:")
    for prefix in ("", "é" * 500, "a b\0\ud800", "x" * 200):
        name = new_instance_id(prefix)
        assert check_name("instance", name) == name
        assert name.isascii()
        assert name.isprintable()
        assert " " not in name
