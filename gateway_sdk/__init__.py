"""The gateway's side of Relay Dispatch: enqueue work for a relay and wait for its result."""

from dispatch_core.models import DispatchRequest, DispatchResult, DispatchStatus
from gateway_sdk.client import GatewayClient
from gateway_sdk.health import GatewayHealth
from gateway_sdk.outbox import OutboxDrainer
from gateway_sdk.outbox_sinks import DispatchSink, OutboxRoute
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.tenant import TenantClient
from gateway_sdk.webhooks import WebhookSink

__all__ = [
    "DispatchRequest",
    "DispatchResult",
    "DispatchSink",
    "DispatchStatus",
    "GatewayClient",
    "GatewayHealth",
    "GatewaySettings",
    "OutboxDrainer",
    "OutboxRoute",
    "TenantClient",
    "WebhookSink",
]
