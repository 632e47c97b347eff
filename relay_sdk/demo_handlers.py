"""The relays of `relay-dispatch demo`: two destinations, with handlers that behave as backends do.

erp      TotalOrder    adds up an order, exactly
         ReserveStock  is refused by a busy warehouse some times, and retried
         QuoteNow      takes its time, longer than its caller has
         Echo          answers what it was asked
archive  HashDocument  a `def` handler: it computes, so it runs in a thread
         RunReport     slow, but not busy
"""

from __future__ import annotations

import hashlib
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

import anyio

from dispatch_core.models import DispatchJob
from relay_sdk.outcomes import Reject, Reply, Retry
from relay_sdk.relay import Relay

__all__ = ["archive", "erp"]

# `relay run --tenant` may name others.
TENANTS = ["acme", "globex", "initech"]
CENT = Decimal("0.01")

erp = Relay("erp", tenants=TENANTS)
archive = Relay("archive", tenants=TENANTS)


@erp.handler("TotalOrder", timeout=10)
async def total_order(job: DispatchJob) -> Reply:
    """Answer the net and the gross sum of an order's lines."""
    order = job.json()
    try:
        net = sum((Decimal(line["price"]) * int(line["quantity"]) for line in order["lines"]), Decimal())
        gross = net * (1 + Decimal(order.get("tax", "0")))
    except (ArithmeticError, InvalidOperation, KeyError, TypeError, ValueError, AttributeError) as error:
        # The sender's fault: another attempt would not help.
        raise Reject("ORDER-INVALID", f"this is no order: {error!r}", status=422) from None
    return Reply.json({"net": f"{net:.2f}", "gross": str(gross.quantize(CENT, ROUND_HALF_UP))})


@erp.handler("ReserveStock", timeout=10)
async def reserve_stock(job: DispatchJob) -> Reply:
    """Reserve a product; the warehouse is busy for the first `failures` attempts."""
    if job.attempt <= int(job.json().get("failures", 0)):
        if job.last_attempt:
            raise Reject("WAREHOUSE-BUSY", f"the warehouse was busy {job.attempt} times", status=503)
        raise Retry(after=0.2 * job.attempt, message="the warehouse is busy")
    return Reply.json({"reserved": True, "attempt": job.attempt}, status=201)


@erp.handler("QuoteNow")
async def quote_now(job: DispatchJob) -> Reply:
    """Think for `seconds` about a price. At the deadline the job is expired and this handler cancelled."""
    await anyio.sleep(float(job.json().get("seconds", 30)))
    return Reply.json({"price": "42.00"})


@erp.handler("Echo")
async def echo(job: DispatchJob) -> Reply:
    """Answer the body and the headers of the request."""
    return Reply(job.body, headers=job.headers)


@archive.handler("HashDocument", timeout=20, concurrency=4)
def hash_document(job: DispatchJob) -> Reply:
    """Answer the SHA-256 of the body."""
    return Reply.json({"sha256": hashlib.sha256(job.body).hexdigest(), "bytes": len(job.body)})


@archive.handler("RunReport", timeout=60)
async def run_report(job: DispatchJob) -> Reply:
    """Run a report that takes `seconds`."""
    await anyio.sleep(float(job.json().get("seconds", 1)))
    return Reply.json({"report": job.json().get("report"), "pages": 12})
