"""Health, readiness, version and metrics, for probes and dashboards. These routes need no API key."""

from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import orca_jax
from server.gateway.gateway import Phase
from server.http.bodies.errors import NOT_READY_SECONDS
from server.http.state import GatewayOf

router = APIRouter(tags=["status"])

_RETRY = {"Retry-After": str(NOT_READY_SECONDS)}
_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


class Health(BaseModel):
    """The process is alive."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """The server's phase, and the reason if it is not ready."""

    status: Phase
    reason: str | None = None


class Version(BaseModel):
    """The running version of orca_jax."""

    version: str


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Health:
    """Liveness: 200 as long as the process is alive, even if it cannot serve requests."""
    return Health()


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses={503: {"model": Readiness, "description": "Not ready"}})
async def ready(gateway: GatewayOf) -> Response:
    """Readiness: 200 if requests run at once, else 503 with the reason.

    503 while the model loads, while the server drains, after the engine has failed, while lost workers
    restart, and while the engine is paused or asleep. During a restart or a pause requests are accepted, and
    wait.
    """
    phase, reason = gateway.status
    body = Readiness(status=phase, reason=reason).model_dump(exclude_none=True)
    if phase is Phase.READY:
        return JSONResponse(body)
    return JSONResponse(body, 503, None if phase is Phase.FAILED else _RETRY)  # a failed engine stays failed


@router.get("/version")
async def version() -> Version:
    """The version of orca_jax."""
    return Version(version=orca_jax.__version__)


@router.get("/metrics", response_class=Response, responses={200: _TEXT})
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    server_metrics = request.app.state.metrics
    return Response(await server_metrics.scrape(), headers={"Content-Type": server_metrics.content_type})
