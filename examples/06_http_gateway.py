"""An HTTP gateway: POST answers 202 with the job's id at once; GET, in any process, tells where the job stands.
POST answers 503 with Retry-After where 1000 jobs of the tenant wait for the relay. After `make setup` (for uvicorn and
starlette), and with what 02 exports, each of the first two in a terminal (and a second gateway, with 8002, in a third):
    .venv/bin/python examples/02_relay.py
    .venv/bin/python examples/06_http_gateway.py 8001
    curl -i -H 'x-tenant: acme' -d '{"number": 7}' http://127.0.0.1:8001/relays/erp-emea/GetInvoice
    curl -i -H 'x-tenant: acme' http://127.0.0.1:8002/jobs/…
"""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dispatch_core import BacklogFullError, RelayDispatchError
from gateway_sdk import GatewayClient

gateway = GatewayClient(os.environ.get("RELAY_DISPATCH_DSN") or sys.exit("set RELAY_DISPATCH_DSN, as in 02"))


async def enqueue(request: Request) -> Response:
    # A real gateway takes the tenant from a verified token, never from a header.
    acme = gateway.tenant(request.headers.get("x-tenant", ""))
    job_id = await acme.enqueue(**request.path_params, body=await request.body(), ttl=60, max_pending=1000)
    return JSONResponse({"job_id": str(job_id)}, 202, headers={"location": f"/jobs/{job_id}"})


async def show(request: Request) -> Response:
    result = await gateway.tenant(request.headers.get("x-tenant", "")).poll_status(request.path_params["job_id"])
    if result is None:
        return JSONResponse({"error": "no such job"}, 404)
    if result.status == "succeeded":
        return Response(result.response_body, result.response_status or 200)
    return JSONResponse({"status": result.status, "error": result.error_code}, 502 if result.is_terminal else 202)


def on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RelayDispatchError)
    headers = {"retry-after": str(int(error.retry_after_seconds) + 1)} if isinstance(error, BacklogFullError) else {}
    return JSONResponse({"error": error.code, "message": str(error)}, 503 if error.retryable else 400, headers)


@asynccontextmanager
async def lifespan(_app: Starlette) -> AsyncIterator[None]:
    async with gateway:
        yield
        print(f"done: {gateway.health().enqueued} enqueued, {gateway.health().polled} polled", flush=True)


if __name__ == "__main__":
    routes = [Route("/relays/{relay_id}/{operation}", enqueue, methods=["POST"]), Route("/jobs/{job_id:uuid}", show)]
    app = Starlette(routes=routes, exception_handlers={RelayDispatchError: on_error}, lifespan=lifespan)
    uvicorn.run(app, port=int(sys.argv[1]) if sys.argv[1:] else 8001, log_level="warning")
