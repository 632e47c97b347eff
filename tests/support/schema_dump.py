"""The schema as pg_dump writes it. `python -m tests.support.schema_dump` writes tests/schema.sql anew."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from dispatch_core.dev.postgres import DevServer, start_local_server
from tests.support.databases import make_template, new_database

SCHEMA_FILE = Path(__file__).resolve().parent.parent / "schema.sql"
# Each major version writes a dump in its own way; this is the one that the file is kept in.
MAJOR = 18

_NOISE = re.compile(r"^(--.*|\\(un)?restrict .*|SET .*|SELECT pg_catalog\.set_config.*)?$")


def dump(server: DevServer, dsn: str) -> str:
    """Return tables, functions, policies, owners and rights of schema relay, without what differs from run to run."""
    assert server.cluster is not None, "only a local server has a pg_dump beside it"
    arguments = ["--schema-only", "--schema=relay", "--no-comments", "--dbname", dsn]
    written = subprocess.run(
        [server.cluster.binaries / "pg_dump", *arguments], check=True, capture_output=True, text=True, timeout=60
    )
    # Bodies are reviewed where they are written; here their signatures, settings, owners and rights are.
    headers = re.sub(r"AS \$\$.*?\$\$;", "AS $$ … $$;", written.stdout, flags=re.DOTALL)
    paragraphs = re.split(r"\n(?=--\n-- Name: )", headers)
    kept = ("\n".join(line for line in text.splitlines() if not _NOISE.match(line)) for text in paragraphs)
    return "\n\n".join(text for text in kept if text) + "\n"


async def _write() -> None:
    with start_local_server(ephemeral=True) as server:
        async with new_database(server, await make_template(server)) as database:
            SCHEMA_FILE.write_text(dump(server, database.admin_dsn))


if __name__ == "__main__":
    asyncio.run(_write())
    print(f"{SCHEMA_FILE} is written anew: review it, and commit it with the migration.", file=sys.stderr)
