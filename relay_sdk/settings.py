"""The relay's settings, by environment ``RELAY_…`` or in code. How to reach PostgreSQL is in `CoreSettings`."""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from dispatch_core.settings import Settings

__all__ = ["RelaySettings"]

_MIB: Final = 1024 * 1024


class RelaySettings(Settings):
    """How a relay claims, runs and gives back."""

    model_config = SettingsConfigDict(env_prefix="RELAY_")

    concurrency: int = Field(
        default=100, ge=1, le=100_000, description="jobs in hand at once, those whose completion is under way included"
    )
    threads: int = Field(
        default=40, ge=1, le=10_000, description="`def` handlers without a concurrency of their own that run at once"
    )
    claim_batch: int = Field(default=500, ge=1, le=10_000, description="jobs in one claim at most")
    complete_batch: int = Field(default=500, ge=1, le=10_000, description="jobs in one completion at most")
    claim_body_limit_bytes: int = Field(
        default=65536, ge=0, le=_MIB, description="larger request bodies are fetched when their handler is to start"
    )
    max_result_bytes: int = Field(
        default=8 * _MIB, ge=0, le=512 * _MIB, description="the largest response body; a larger one fails its job"
    )
    lease_seconds: float = Field(
        default=30.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="after which a silent relay's jobs are taken back",
    )
    heartbeat_seconds: float | None = Field(
        default=None,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="between renewals of a lease; default: a third of it",
    )
    poll_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="between looks at the queue without a wake-up, ± 25 %",
    )
    sweep_seconds: float = Field(
        default=5.0, gt=0, le=3600, allow_inf_nan=False, description="between sweeps for lost leases and late jobs"
    )
    grace_seconds: float = Field(
        default=30.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="that handlers get to finish in when the relay stops",
    )
    retry_base_seconds: float = Field(
        default=1.0, ge=0, le=3600, allow_inf_nan=False, description="the longest pause before the second attempt"
    )
    retry_cap_seconds: float = Field(
        default=60.0, ge=0, le=86400, allow_inf_nan=False, description="the longest pause before any attempt"
    )

    chunk_concurrency: int = Field(
        default=16, ge=1, le=10_000, description="chunks in hand at once, those whose completion is under way included"
    )
    chunk_claim_batch: int = Field(default=100, ge=1, le=10_000, description="chunks in one claim at most")
    chunk_complete_batch: int = Field(default=100, ge=1, le=10_000, description="chunks in one completion at most")
    chunk_stop_seconds: float = Field(
        default=5.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="from telling the handler of a chunk to stop (pause, cancel, lost lease) to cancelling it",
    )
    chunk_row_errors: int = Field(
        default=100_000, ge=1, le=10_000_000, description="row errors that a chunk may have waiting to be stored"
    )

    @property
    def heartbeat_interval_seconds(self) -> float:
        """Return `heartbeat_seconds`, or a third of the lease where it is not set."""
        return self.lease_seconds / 3 if self.heartbeat_seconds is None else self.heartbeat_seconds

    @property
    def patience_seconds(self) -> float:
        """Return how long a statement may go unanswered: its retry has to come well before a lease is over."""
        return max(self.lease_seconds / 3, 2.0)

    @model_validator(mode="after")
    def _a_lease_outlives_two_heartbeats(self) -> Self:
        if self.heartbeat_interval_seconds * 2 > self.lease_seconds:
            raise ValueError("heartbeat_seconds must be at most half of lease_seconds: one may be lost")
        return self
