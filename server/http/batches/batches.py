"""`/v1/batches`: a file of requests, answered at the lowest priority while the engine has time."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from orca_jax.errors import InvalidRequest
from server.batches.batch import WINDOW
from server.errors import BatchesOff
from server.http.bodies.errors import error_responses
from server.http.bodies.json_body import JsonRoute
from server.http.bodies.lists import After, Limit, ListPage, listing, page
from server.http.fields.strict import NotBuilt, Strict
from server.http.state import BatchesOf, FingerprintOf, OwnerOf

_MAX_METADATA = 16

router = APIRouter(
    prefix="/v1/batches", tags=["batches"], route_class=JsonRoute, responses=error_responses(503)
)


class BatchRequest(Strict):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=256)]
    endpoint: Annotated[
        Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"],
        Field(description="the endpoint of every line"),
    ]
    completion_window: Annotated[Literal["24h"], Field(description="lines that have not run by then expire")]
    metadata: Annotated[
        dict[str, Annotated[str, Field(max_length=512)]] | None,
        Field(description="returned with the batch; up to 16 entries", max_length=_MAX_METADATA),
    ] = None
    output_expires_after: Annotated[
        dict[str, Any] | None, NotBuilt(why="the files stay until they are deleted")
    ] = None


class RequestCounts(BaseModel):
    """The progress of a batch. A line whose answer is an error has failed, and is in the error file."""

    total: int
    completed: int
    failed: int


class BatchFault(BaseModel):
    """A fault in a batch's input, with its line."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchFaults(BaseModel):
    """The first faults in a batch's input, because of which it failed."""

    object: Literal["list"] = "list"
    data: list[BatchFault]


class BatchObject(BaseModel):
    """A batch, in OpenAI's form. Times are in seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str = WINDOW
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(ListPage):
    """A page of batches."""

    data: list[BatchObject]


@router.post("", responses=error_responses(404, 429))
async def create_batch(
    body: BatchRequest, batches: BatchesOf, tenant: FingerprintOf, owner: OwnerOf
) -> BatchObject:
    """Run every line of a file."""
    stored = batches.files.get(body.input_file_id, tenant)
    if stored.purpose != "batch":
        message = f"the file {stored.id} has the purpose {stored.purpose!r}; an input file must have 'batch'"
        raise InvalidRequest(message, param="input_file_id")
    batch = await batches.create(
        tenant=tenant, owner=owner, endpoint=body.endpoint, input_file=stored, metadata=body.metadata
    )
    return BatchObject(**batch.shown())


@router.get("", response_model=BatchList, responses=error_responses(400))
async def list_batches(
    batches: BatchesOf, tenant: FingerprintOf, limit: Limit = 20, after: After = None
) -> Response:
    """List your batches, the newest first."""

    def body() -> bytes:
        some, has_more = page(batches.table.of(tenant), after, limit, lambda batch: batch.id)
        return listing([one.shown() for one in some], has_more)

    return Response(await batches.on_disk(body), media_type="application/json")


@router.get("/{batch_id}", responses=error_responses(404))
async def get_batch(batches: BatchesOf, tenant: FingerprintOf, batch_id: str) -> BatchObject:
    """Describe a batch, its progress and its files."""
    return BatchObject(**batches.table.get(batch_id, tenant).shown())


@router.post("/{batch_id}/cancel", responses=error_responses(400, 404))
async def cancel_batch(batches: BatchesOf, tenant: FingerprintOf, batch_id: str) -> BatchObject:
    """Cancel a batch. Lines that have been answered keep their results."""
    batch = batches.table.get(batch_id, tenant)
    await batches.cancel(batch)
    return BatchObject(**batch.shown())


def off_router() -> APIRouter:
    """The routes of a server without --batch-dir: each answers how to turn them on."""
    router = APIRouter(include_in_schema=False)

    async def off() -> None:
        message = "this server keeps no files and runs no batches"
        raise BatchesOff(f"{message}; orca serve --batch-dir FOLDER turns them on")

    for path in ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}"):
        router.add_api_route(path, off, methods=["GET", "POST", "DELETE"])
    return router
