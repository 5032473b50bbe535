"""How the server is: for probes, load balancers and dashboards. None of these needs a key."""

from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import orca_jax
from server.gateway.gateway import Phase
from server.http.bodies.errors import NOT_READY_SECONDS
from server.http.generation.state import GatewayOf

router = APIRouter(tags=["status"])

_RETRY = {"Retry-After": str(NOT_READY_SECONDS)}
_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


class Health(BaseModel):
    """The process lives."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """Whether requests are taken and run at once, and if not, why."""

    status: Phase
    reason: str | None = None


class Version(BaseModel):
    """What is running."""

    version: str


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Health:
    """200 as long as the process lives, whatever it can do."""
    return Health()


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses={503: {"model": Readiness, "description": "Not ready"}})
async def ready(gateway: GatewayOf) -> Response:
    """200 while requests run; 503 while the model loads, while the server drains, or for good, and while lost
    workers are brought up again: requests are taken then, and wait.
    """
    phase, reason = gateway.status
    body = Readiness(status=phase, reason=reason).model_dump(exclude_none=True)
    if phase is Phase.READY:
        return JSONResponse(body)
    return JSONResponse(body, 503, None if phase is Phase.FAILED else _RETRY)  # a failed engine stays so


@router.get("/version")
async def version() -> Version:
    """The version of orca_jax."""
    return Version(version=orca_jax.__version__)


@router.get("/metrics", response_class=Response, responses={200: _TEXT})
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    figures = request.app.state.metrics
    return Response(await figures.scrape(), headers={"Content-Type": figures.content_type})
