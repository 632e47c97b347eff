"""Read the configuration: the one place where the environment and `pydantic` are known.

A field's unit is in its name. The prefix of the environment variables is the class's `env_prefix`, so the field
``connect_timeout_seconds`` is read from ``RELAY_DISPATCH_CONNECT_TIMEOUT_SECONDS``; an argument given in code comes
before the environment. DSNs are `SecretStr`, so no repr, log line or traceback of a settings object shows a password.
"""

from __future__ import annotations

import re
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from dispatch_core.errors import ConfigurationError

__all__ = ["CoreSettings", "DurableJobsSettings", "OutboxSettings", "RouteSettings", "Settings", "redact_dsn"]

MIB: Final = 1024 * 1024


class Settings(BaseSettings):
    """What all settings classes share: immutable, nothing unknown accepted, no input value in any error text."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True)

    def __init__(self, **values: Any) -> None:
        """Read the settings; those in `values` come before the environment.

        Raises: ConfigurationError, which names each wrong setting by field and environment variable, without values.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = [
                self._problem([str(part) for part in problem["loc"]], problem["msg"].removeprefix("Value error, "))
                for problem in error.errors(include_input=False, include_url=False, include_context=False)
            ]
            # `from None`: the chained error of pydantic would be printed with it, and it is long.
            raise ConfigurationError("; ".join(problems)) from None
        except SettingsError as error:
            # Of a value that is written as JSON. Its text names the field, and the one behind it quotes the value.
            field = re.search(r'field "(\w+)"', str(error))
            raise ConfigurationError(self._problem([field[1]] if field else [], "is not valid JSON")) from None

    @classmethod
    def _problem(cls, where: list[str], what: str) -> str:
        if not where:
            return f"{cls.__name__}: {what}"
        variable = f"{cls.model_config.get('env_prefix', '')}{where[0]}".upper()
        return f"{'.'.join(where)} ({variable}): {what}"

    @classmethod
    def load(cls, **values: Any) -> Self:
        """Read the settings as the class itself does, but for values that are None: these are as if not given.

        Raises: ConfigurationError.
        """
        return cls(**{name: value for name, value in values.items() if value is not None})


class CoreSettings(Settings):
    """What both SDKs need to reach PostgreSQL."""

    model_config = SettingsConfigDict(env_prefix="RELAY_DISPATCH_")

    dsn: SecretStr | None = Field(
        default=None, description="PostgreSQL, or the pooler before it, as a postgresql:// URL"
    )
    listen_dsn: SecretStr | None = Field(
        default=None, description="PostgreSQL directly, for LISTEN, where a pooler stands before it; default: the dsn"
    )
    pool_min_size: int = Field(default=1, ge=0, le=1000, description="connections opened at start")
    pool_max_size: int = Field(default=10, ge=1, le=1000, description="connections at most")
    statement_cache_size: int = Field(
        default=100, ge=0, description="prepared statements kept per connection; 0 behind a transaction pooler"
    )
    connect_timeout_seconds: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="for opening a connection or getting one of the pool",
    )
    command_timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="for one statement, after which its connection is dropped",
    )
    application_name: str = Field(
        default="relay-dispatch", min_length=1, max_length=40, description="shown in pg_stat_activity"
    )
    max_body_bytes: int = Field(default=8 * MIB, ge=0, le=512 * MIB, description="the largest request body")
    probe_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="between two proofs that the listening connection hears",
    )
    probe_timeout_seconds: float = Field(
        default=3.0, gt=0, le=600, allow_inf_nan=False, description="for one such proof, after which it connects anew"
    )
    reconnect_cap_seconds: float = Field(
        default=10.0, gt=0, le=3600, allow_inf_nan=False, description="the longest pause between two tries to connect"
    )

    def require_dsn(self) -> str:
        """Return the DSN, password and all.

        Raises: ConfigurationError where none is set.
        """
        if self.dsn is None or not self.dsn.get_secret_value():
            raise ConfigurationError("no DSN: give dsn= or set RELAY_DISPATCH_DSN")
        return self.dsn.get_secret_value()

    def require_listen_dsn(self) -> str:
        """Return the DSN of the listening connection, password and all: `listen_dsn`, else `dsn`.

        Raises: ConfigurationError where neither is set.
        """
        if self.listen_dsn is not None and self.listen_dsn.get_secret_value():
            return self.listen_dsn.get_secret_value()
        return self.require_dsn()


class RouteSettings(BaseModel):
    """Where events of a kind go as dispatch jobs: one value of OUTBOX_ROUTES."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    relay: str
    operation: str
    ttl_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_attempts: int = Field(default=1, ge=1)
    headers: dict[str, str | list[str]] = Field(default_factory=dict)


class OutboxSettings(Settings):
    """What draining the outbox needs."""

    model_config = SettingsConfigDict(env_prefix="OUTBOX_")

    dsn: SecretStr | None = Field(
        default=None, description="the database that holds the outbox, as a postgresql:// URL; default: the gateway's"
    )
    listen_dsn: SecretStr | None = Field(
        default=None,
        description="that database directly, for LISTEN, where a pooler stands before it; default: the dsn",
    )
    drain_interval_sec: float = Field(
        default=0.0,
        ge=0,
        le=86400,
        allow_inf_nan=False,
        description="between two looks for events, beside the wake-ups; 0 = off: no task, connection or statement",
    )
    routes: dict[str, RouteSettings] = Field(
        default={},
        description="kind -> where its events go as dispatch jobs: "
        '`{"order.placed": {"relay": "erp-emea", "operation": "PostOrder", "ttl_seconds": 3600, "max_attempts": 3}}`',
    )
    batch_size: int = Field(default=100, ge=1, le=10_000, description="events claimed at once, at most")
    max_batch_bytes: int = Field(default=8 * MIB, ge=0, le=128 * MIB, description="what their payloads come to, about")
    concurrency: int = Field(default=10, ge=1, le=1000, description="sinks called at a time, for one batch")
    sink_timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="for one event, after which its sink is cancelled",
    )
    stale_claim_seconds: float = Field(
        default=300.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="after which the claim of a drainer that does not answer is taken back; the same for all drainers",
    )
    max_attempts: int = Field(default=25, ge=1, description="failed deliveries after which an event is parked")
    backoff_base_seconds: float = Field(
        default=1.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="the longest pause after the first failure; doubles",
    )
    backoff_cap_seconds: float = Field(
        default=900.0, gt=0, le=86400, allow_inf_nan=False, description="the longest pause of all"
    )
    retry_horizon_seconds: float = Field(
        default=3 * 86400.0,
        gt=0,
        le=6 * 86400.0,
        allow_inf_nan=False,
        description="after its first claim, past which an event is parked: before a dispatch job's key is forgotten",
    )
    stop_timeout_seconds: float = Field(
        default=5.0,
        gt=0,
        le=600,
        allow_inf_nan=False,
        description="for giving a batch back when the drain is cancelled",
    )

    @model_validator(mode="after")
    def _a_sink_ends_before_its_claim_is_stale(self) -> Self:
        # Begun within two thirds of the claim's time, it must be over before the rest is.
        if self.sink_timeout_seconds * 3 >= self.stale_claim_seconds:
            raise ValueError("sink_timeout_seconds must be less than a third of stale_claim_seconds")
        return self


class DurableJobsSettings(Settings):
    """How durable jobs are kept: leases, attempts, sizes, sweeps. The same for all processes of a database."""

    model_config = SettingsConfigDict(env_prefix="DURABLE_")

    lease_seconds: float = Field(
        default=60.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="a chunk is its holder's for so long, from each heartbeat on",
    )
    heartbeat_seconds: float | None = Field(
        default=None,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="between two heartbeats; default: a third of the lease",
    )
    retry_base_seconds: float = Field(
        default=1.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="the longest pause after a chunk's first failure; doubles",
    )
    retry_cap_seconds: float = Field(
        default=300.0, gt=0, le=86400, allow_inf_nan=False, description="the longest pause of all"
    )
    skip_locked_claims: bool = Field(
        default=True, description="claim the next chunk in one statement; false: look for it, then compare-and-set"
    )
    insert_batch: int = Field(default=1000, ge=1, le=100_000, description="chunks stored in one statement, at most")
    insert_batch_bytes: int = Field(
        default=4 * MIB, ge=1024, le=128 * MIB, description="what their payloads come to, about"
    )
    max_payload_bytes: int = Field(
        default=MIB, ge=0, le=128 * MIB, description="the largest payload of a chunk, or params of a job"
    )
    max_checkpoint_bytes: int = Field(
        default=256 * 1024, ge=0, le=128 * MIB, description="the largest checkpoint, or outcome, of a chunk"
    )
    row_error_batch: int = Field(default=1000, ge=1, le=100_000, description="row errors stored at once by a handler")
    event_lock_timeout_seconds: float = Field(
        default=1.0,
        gt=0,
        le=60,
        allow_inf_nan=False,
        description="what an event from the side waits for at most, before it is only logged",
    )
    sweep_seconds: float = Field(
        default=5.0, gt=0, le=3600, allow_inf_nan=False, description="between two looks for leases that have run out"
    )
    finish_sweep_seconds: float = Field(
        default=15.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="between two looks for jobs that nobody has ended",
    )
    remove_sweep_seconds: float = Field(
        default=60.0, gt=0, le=86400, allow_inf_nan=False, description="between two removals of old jobs"
    )
    sweep_batch: int = Field(default=100, ge=1, le=10_000, description="rows that a sweep changes at a time")
    retention_seconds: float = Field(
        default=30 * 86400.0,
        gt=0,
        le=3650 * 86400.0,
        allow_inf_nan=False,
        description="after its end, when a job is removed with all that was told of it",
    )
    abandoned_seconds: float = Field(
        default=86400.0,
        gt=0,
        le=3650 * 86400.0,
        allow_inf_nan=False,
        description="after the last chunk of a submission that was never finished, when it is removed",
    )

    @model_validator(mode="after")
    def _a_heartbeat_comes_well_before_the_lease_ends(self) -> Self:
        if self.heartbeat_seconds is not None and self.heartbeat_seconds * 2 > self.lease_seconds:
            raise ValueError("heartbeat_seconds must be at most half of lease_seconds")
        return self

    @property
    def heartbeat_interval_seconds(self) -> float:
        """Between two heartbeats, whether it was set or not."""
        return self.lease_seconds / 3 if self.heartbeat_seconds is None else self.heartbeat_seconds


_SECRET_PARAMETER: Final = re.compile(r"(?i)\b((?:ssl)?password|passfile)(\s*=\s*)('(?:[^'\\]|\\.)*'|[^&\s]*)")


def redact_dsn(dsn: str | SecretStr) -> str:
    """Return a DSN that can be shown to a person: without its password, wherever that is written.

    Hides too much rather than too little: where a password holds an unescaped ``@``, ``/`` or ``:``, all from the first
    colon to the last ``@`` is hidden.
    """
    text = dsn.get_secret_value() if isinstance(dsn, SecretStr) else dsn
    scheme, separator, rest = text.partition("://")
    if separator:
        credentials, at, location = rest.rpartition("@")
        user, colon, _ = credentials.partition(":")
        text = f"{scheme}://{user}{':***' if colon else ''}{at}{location}"
    return _SECRET_PARAMETER.sub(r"\1\2***", text)
