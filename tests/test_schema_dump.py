"""The schema that the migrations make is the one in tests/schema.sql, so that a change of it is seen in review."""

from __future__ import annotations

import difflib

import pytest

from dispatch_core.dev.postgres import DevServer
from tests.support.databases import TestDatabase
from tests.support.schema_dump import MAJOR, SCHEMA_FILE, dump


async def test_the_schema_is_the_one_that_was_reviewed(
    server: DevServer, database: TestDatabase, has_high_counters: bool
) -> None:
    if has_high_counters:
        pytest.skip("the defaults of counters are not those of the migrations")
    if server.cluster is None or server.cluster.major != MAJOR:
        pytest.skip(f"the dump is kept as the pg_dump of a local PostgreSQL {MAJOR} writes it")
    written, found = SCHEMA_FILE.read_text().splitlines(), dump(server, database.admin_dsn).splitlines()
    difference = "\n".join(difflib.unified_diff(written, found, "tests/schema.sql", "migrations/", lineterm="", n=2))
    assert not difference, f"run: python -m tests.support.schema_dump\n{difference}"


def test_the_dump_holds_what_must_not_change_unseen() -> None:
    text = SCHEMA_FILE.read_text()
    for fragment in (
        "CREATE TABLE relay.s2r_relay_dispatch_queue",
        "CREATE FUNCTION relay.claim(",
        "CREATE POLICY by_tenant ON relay.s2r_relay_dispatch_queue",
        "FORCE ROW LEVEL SECURITY",
        "SECURITY DEFINER",
        "OWNER TO relay_owner",
        "REVOKE ALL ON FUNCTION relay.claim(",
        "GRANT ALL ON FUNCTION relay.complete(",
        "CREATE INDEX s2r_relay_dispatch_queue_ready",
    ):
        assert fragment in text, fragment
    for noise in ("Dumped", "restrict", "Name:", "standard_conforming_strings"):
        assert noise not in text, noise
