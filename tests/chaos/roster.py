"""Who takes part: two gateways, four relay processes, three tenants, two relays; and their settings."""

from __future__ import annotations

from typing import Final

__all__ = ["GATEWAYS", "NOT_REACHED", "RELAYS", "SERVES", "SETTINGS", "TENANTS"]

TENANTS: Final = ("acme", "beta", "zeta")

SERVES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "relay-0": {"erp": ("acme", "beta", "zeta")},
    "relay-1": {"erp": ("acme", "beta"), "crm": ("beta",)},
    "relay-2": {"crm": ("acme", "beta", "zeta")},
    "relay-3": {"erp": ("zeta",), "crm": ("acme", "zeta")},
}
"""Process -> relay -> tenants. Each pair is served by two, so that what one loses another finds."""

RELAYS: Final = tuple(SERVES)
GATEWAYS: Final = ("gateway-0", "gateway-1")

NOT_REACHED: Final = 5
"""How a process ends that finds no database at its start."""

LEASE_SECONDS: Final = 3.0
GRACE_SECONDS: Final = 2.0

SETTINGS: Final = {
    "RELAY_DISPATCH_POOL_MAX_SIZE": "6",
    "RELAY_DISPATCH_CONNECT_TIMEOUT_SECONDS": "3",
    "RELAY_DISPATCH_COMMAND_TIMEOUT_SECONDS": "5",
    "RELAY_DISPATCH_PROBE_SECONDS": "1",
    "RELAY_DISPATCH_PROBE_TIMEOUT_SECONDS": "1",
    "RELAY_DISPATCH_RECONNECT_CAP_SECONDS": "1",
    "RELAY_LEASE_SECONDS": str(LEASE_SECONDS),
    "RELAY_POLL_SECONDS": "1",
    "RELAY_SWEEP_SECONDS": "0.5",
    "RELAY_GRACE_SECONDS": str(GRACE_SECONDS),
    "RELAY_CONCURRENCY": "60",
    "RELAY_RETRY_BASE_SECONDS": "0.1",
    "RELAY_RETRY_CAP_SECONDS": "0.5",
    "GATEWAY_POLL_INTERVAL_SECONDS": "1",
    "GATEWAY_POLL_TIMEOUT_SECONDS": "3",
    "GATEWAY_WRITE_TIMEOUT_SECONDS": "5",
    "GATEWAY_SWEEP_INTERVAL_SECONDS": "1",
    "GATEWAY_LEASE_SECONDS": str(LEASE_SECONDS),
    "GATEWAY_CLOSE_TIMEOUT_SECONDS": "3",
    "DURABLE_LEASE_SECONDS": str(LEASE_SECONDS),
    "DURABLE_SWEEP_SECONDS": "0.5",
    "DURABLE_FINISH_SWEEP_SECONDS": "1",
    "DURABLE_RETRY_BASE_SECONDS": "0.1",
    "DURABLE_RETRY_CAP_SECONDS": "0.5",
    "OUTBOX_DRAIN_INTERVAL_SEC": "0.5",
    "OUTBOX_STALE_CLAIM_SECONDS": "16",
    "OUTBOX_SINK_TIMEOUT_SECONDS": "5",
    "OUTBOX_MAX_ATTEMPTS": "1000",
    "OUTBOX_BACKOFF_CAP_SECONDS": "1",
    "OUTBOX_RETRY_HORIZON_SECONDS": "86400",
    "OUTBOX_ROUTES": '{"order": {"relay": "erp", "operation": "Order", "ttl_seconds": 60, "max_attempts": 3}}',
}
