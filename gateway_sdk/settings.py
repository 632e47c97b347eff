"""The settings of a gateway; see `dispatch_core.settings` for how they are read."""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from dispatch_core.settings import CoreSettings, Settings

__all__ = ["GatewaySettings"]

DAY: Final = 86400.0
MIB: Final = 1024 * 1024


class GatewaySettings(Settings):
    """How a gateway enqueues, waits and tidies; `core` is how it reaches PostgreSQL."""

    model_config = SettingsConfigDict(env_prefix="GATEWAY_")

    core: CoreSettings = Field(default_factory=CoreSettings.load, description="see RELAY_DISPATCH_…")

    default_ttl_seconds: float = Field(
        default=300.0,
        gt=0,
        le=10_000 * DAY,
        allow_inf_nan=False,
        description="from enqueue to deadline, where not said",
    )
    max_ttl_seconds: float = Field(
        default=7 * DAY, gt=0, le=10_000 * DAY, allow_inf_nan=False, description="the longest ttl that is accepted"
    )
    max_pending: int = Field(
        default=0,
        ge=0,
        lt=2**62,
        description="jobs of one tenant that may wait for one relay before enqueues are refused; 0 = any number",
    )
    write_timeout_seconds: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="for an enqueue or a withdrawal, repetitions included",
    )
    enqueue_batch_items: int = Field(default=500, ge=1, le=10_000, description="jobs in one INSERT at most")
    enqueue_batch_bytes: int = Field(
        default=4 * MIB, ge=1, le=256 * MIB, description="of one INSERT; one job may be more"
    )
    enqueue_concurrency: int = Field(default=2, ge=1, le=100, description="INSERTs under way at once per tenant")
    lock_timeout_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="for another transaction that is enqueuing the same idempotency key",
    )
    poll_interval_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="between polls beneath the push, less up to a fifth",
    )
    poll_timeout_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="for one poll, after which its connection is dropped",
    )
    poll_batch_items: int = Field(default=2000, ge=1, le=10_000, description="jobs in one poll at most")
    deadline_grace_seconds: float = Field(
        default=1.0,
        gt=0,
        le=60,
        allow_inf_nan=False,
        description="for asking the database, at a job's deadline, how the job ended",
    )
    max_channels: int = Field(
        default=1000, ge=0, le=1000, description="tenants whose results are pushed; those of others are polled"
    )
    tenant_idle_seconds: float = Field(
        default=60.0, gt=0, le=DAY, allow_inf_nan=False, description="after which what is kept for a tenant is dropped"
    )
    sweep_interval_seconds: float = Field(
        default=5.0, ge=0, le=DAY, allow_inf_nan=False, description="between sweeps, ± a fifth; 0 = none"
    )
    lease_seconds: float = Field(
        default=30.0, gt=0, le=DAY, allow_inf_nan=False, description="the longest lease of a relay, for the sweep"
    )
    result_keep_seconds: float = Field(
        default=7 * DAY,
        gt=0,
        le=10_000 * DAY,
        allow_inf_nan=False,
        description="how long a result is kept; of all gateways of a database the smallest counts, and an outbox that"
        " drains into that database must give its events up sooner",
    )
    close_timeout_seconds: float = Field(
        default=5.0, gt=0, le=3600, allow_inf_nan=False, description="for sending what waits, when the client closes"
    )

    @model_validator(mode="after")
    def _default_is_accepted(self) -> Self:
        if self.default_ttl_seconds > self.max_ttl_seconds:
            raise ValueError(
                f"default_ttl_seconds (GATEWAY_DEFAULT_TTL_SECONDS, {self.default_ttl_seconds:g}) is above"
                f" max_ttl_seconds (GATEWAY_MAX_TTL_SECONDS, {self.max_ttl_seconds:g})"
            )
        return self

    def with_dsn(self, dsn: str | None, listen_dsn: str | None) -> Self:
        """Return a copy with these DSNs, where they are given."""
        given = {"dsn": dsn, "listen_dsn": listen_dsn}
        changes = {name: SecretStr(value) for name, value in given.items() if value is not None}
        return self.model_copy(update={"core": self.core.model_copy(update=changes)}) if changes else self
