"""The gateway's side of Relay Dispatch: enqueue work for a relay and wait for its result; submit durable jobs."""

from dispatch_core.durable_models import ChunkSpec, ChunkStatus, DurableJob, JobProgress, JobStatus
from dispatch_core.models import DispatchRequest, DispatchResult, DispatchStatus
from dispatch_core.settings import DurableJobsSettings
from gateway_sdk.client import GatewayClient
from gateway_sdk.durable import DurableJobs
from gateway_sdk.health import GatewayHealth
from gateway_sdk.outbox import OutboxDrainer
from gateway_sdk.outbox_sinks import DispatchSink, OutboxRoute
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.tenant import TenantClient
from gateway_sdk.webhooks import WebhookSink

__all__ = [
    "ChunkSpec",
    "ChunkStatus",
    "DispatchRequest",
    "DispatchResult",
    "DispatchSink",
    "DispatchStatus",
    "DurableJob",
    "DurableJobs",
    "DurableJobsSettings",
    "GatewayClient",
    "GatewayHealth",
    "GatewaySettings",
    "JobProgress",
    "JobStatus",
    "OutboxDrainer",
    "OutboxRoute",
    "TenantClient",
    "WebhookSink",
]
