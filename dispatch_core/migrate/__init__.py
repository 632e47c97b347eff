"""Bring the schema `relay` to what this version needs, look at it, and let logins use it.

`migrate` applies, `plan`, `status` and `verify` look, `as_sql` prints for a DBA, `grant` and `revoke` let logins in.
The SDKs only call `check_schema` at their start; they never migrate by themselves.
"""

from __future__ import annotations

from dispatch_core.migrate.access import grant, revoke
from dispatch_core.migrate.check import check_schema
from dispatch_core.migrate.files import Step
from dispatch_core.migrate.runner import MigrationReport, StepEvent, migrate, plan
from dispatch_core.migrate.script import as_sql
from dispatch_core.migrate.status import SchemaStatus, StepStatus, status
from dispatch_core.migrate.verify import verify

__all__ = [
    "MigrationReport",
    "SchemaStatus",
    "Step",
    "StepEvent",
    "StepStatus",
    "as_sql",
    "check_schema",
    "grant",
    "migrate",
    "plan",
    "revoke",
    "status",
    "verify",
]
