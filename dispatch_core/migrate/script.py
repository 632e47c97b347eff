"""Write the migrations as one script, for a DBA who applies them with psql."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dispatch_core.migrate import sql
from dispatch_core.migrate.compare import package_version
from dispatch_core.migrate.files import Migrations, SqlFile, Step, load
from dispatch_core.migrate.roles import CREATE_ROLE, ROLES
from dispatch_core.migrate.runner import SET_LOCAL_ROLE

__all__ = ["as_sql"]

_HEAD = r"""-- Relay Dispatch {version}: the schema of an empty database, for psql and a superuser.
-- It does what `relay-dispatch db migrate` does, history included, so that a later run of that finds nothing to do.
\set ON_ERROR_STOP on
"""

_ROLE = """
do $role$
begin
  if not exists (select from pg_catalog.pg_roles where rolname = '{name}') then
    {create};
  end if;
end $role$;"""


def as_sql(*, only: Sequence[str] | None = None, directory: Path | None = None) -> str:
    """Return everything that `migrate` does to an empty database, as a script for psql, run by a superuser."""
    wanted = load(directory).select(only)
    parts = [_HEAD.replace("{version}", package_version())]
    parts += [_ROLE.replace("{create}", CREATE_ROLE.replace("%I", name)).replace("{name}", name) for name in ROLES]
    parts.append(_transaction(sql.CREATE_SCHEMA + ";", _role("relay_owner"), sql.BOOTSTRAP.strip() + ";"))
    parts += [_table(step) for step in wanted.tables]
    if wanted.functions:
        parts.append(_functions(wanted))
    return "\n".join(parts) + "\n"


def _table(step: Step) -> str:
    file = step.files[0]
    if file.transactional:
        return _transaction(_body(file), _record(step, None))
    role = "none" if file.role is None else file.role
    statement = f"set role {role};\n{_text(file)}\nreset role;"
    return f"\n-- {file.name}\n{statement}\n{_transaction(_record(step, None))}"


def _functions(wanted: Migrations) -> str:
    files = sorted((file for step in wanted.functions for file in step.files), key=lambda file: file.name)
    return _transaction(
        _role("relay_owner"),
        sql.OPEN_CREATE + ";",
        *(_body(file) for file in files),
        _role("relay_owner"),
        sql.CLOSE_CREATE + ";",
        *(_record(step, wanted) for step in wanted.functions),
    )


def _transaction(*parts: str) -> str:
    settings = sql.STEP_SETTINGS.strip() + ";"
    return "\n".join(("\nbegin;", settings, *parts, "commit;"))


def _body(file: SqlFile) -> str:
    return "\n".join((f"\n-- {file.name}", _role(file.role), sql.STEP_SETTINGS.strip() + ";", _text(file)))


def _text(file: SqlFile) -> str:
    text = file.sql.rstrip()
    return text if text.endswith(";") else text + "\n;"


def _role(role: str | None) -> str:
    return SET_LOCAL_ROLE[role] + ";"


def _record(step: Step, functions_of: Migrations | None) -> str:
    values = (
        _literal(step.name),
        _literal(step.kind),
        _literal(step.sha256),
        "null" if functions_of is None else str(functions_of.protocol),
        "null" if functions_of is None else str(functions_of.compatible_from),
        _literal(package_version()),
        "0",
    )
    statement = sql.RECORD
    for number, value in enumerate(values, 1):
        statement = statement.replace(f"${number}", value)
    return _role("relay_owner") + statement.rstrip() + ";"


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
