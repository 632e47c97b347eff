"""Migrations directories of a test's own, and what a test asks about a database."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncpg

ONE = "-- role: relay_owner\ncreate table relay.one (id bigint primary key);\n"
TWO = """-- role: relay_owner
create table relay.two (id bigint primary key);
alter table relay.one add column two text;
"""
INDEX = "-- role: relay_owner\n-- no-transaction\ncreate index concurrently one_two_idx on relay.one (two);\n"
FUNCTION = """-- role: relay_api
create or replace function relay.answer() returns bigint language sql security definer
set search_path = pg_catalog, pg_temp as $$ select 42 $$;
revoke all on function relay.answer() from public;
"""
TABLES = {"0001_one": ONE, "0002_two": TWO, "0003_index": INDEX}
FUNCTIONS = {"10_answer": FUNCTION}


def write_migrations(
    directory: Path,
    tables: Mapping[str, str] | None = None,
    functions: Mapping[str, str] | None = None,
    *,
    protocol: int = 1,
    compatible_from: int = 1,
) -> Path:
    """Write a migrations directory, in place of what was there; return it."""
    for kind, files in (("tables", TABLES if tables is None else tables), ("functions", functions or {})):
        (directory / kind).mkdir(parents=True, exist_ok=True)
        for old in (directory / kind).glob("*.sql"):
            old.unlink()
        for name, text in files.items():
            (directory / kind / f"{name}.sql").write_text(text, newline="")
    (directory / "PROTOCOL").write_text(f"protocol: {protocol}\ncompatible-from: {compatible_from}\n")
    return directory


async def history(connection: asyncpg.Connection[Any]) -> list[str]:
    """Return the applied steps."""
    rows = await connection.fetch("select step from relay.schema_history order by step")
    return [row["step"] for row in rows]


async def relations(connection: asyncpg.Connection[Any]) -> set[str]:
    """Return the tables and indexes in schema relay, without the history's own."""
    rows = await connection.fetch(
        "select relname from pg_class where relnamespace = to_regnamespace('relay') and relname !~ '^schema_history'"
    )
    return {row["relname"] for row in rows}
