"""FastAPI dependencies and query parameters of the routes for files and batches."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request

from server.batches.service import Batches
from server.errors import BatchesOff


async def _batches(request: Request) -> Batches:
    return request.app.state.batches


async def _fingerprint(request: Request) -> str:
    return request.app.state.fingerprint(request.scope["state"]["tenant"])


BatchesOf = Annotated[Batches, Depends(_batches)]
FingerprintOf = Annotated[str, Depends(_fingerprint)]  # of the API key, "" without keys

Limit = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[str | None, Query(description="the last id of the previous page", max_length=256)]
Order = Annotated[Literal["asc", "desc"], Query(description="by time of creation")]


def off_router() -> APIRouter:
    """The routes of a server without --batch-dir: each answers how to turn them on."""
    router = APIRouter(include_in_schema=False)

    async def off() -> None:
        message = "this server keeps no files and runs no batches"
        raise BatchesOff(f"{message}; orca serve --batch-dir FOLDER turns them on")

    for path in ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}"):
        router.add_api_route(path, off, methods=["GET", "POST", "DELETE"])
    return router
