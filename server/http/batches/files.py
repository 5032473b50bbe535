"""`/v1/files`: clients' files, which batches read and write."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from orca_jax.errors import InvalidRequest
from server.batches.files import GrowingFile, StoredFile
from server.batches.service import Batches
from server.http.batches.multipart import read_form
from server.http.bodies.errors import error_responses
from server.http.bodies.lists import After, Limit, ListPage, Order, listing, page
from server.http.state import BatchesOf, FingerprintOf

UPLOAD_SECONDS = 600.0  # for a whole file to arrive
_MOST_BYTES = 200 << 20  # of a file: OpenAI's limit for a batch's input
_PURPOSES = ("batch", "batch_output")
_PIECE = 1 << 18  # bytes of a file that are in memory at a time

_FORM: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "purpose": {"type": "string", "enum": ["batch"]},
                    "file": {"type": "string", "format": "binary"},
                },
                "required": ["purpose", "file"],
            }
        }
    },
}

router = APIRouter(prefix="/v1/files", tags=["batches"], responses=error_responses(503))


class File(BaseModel):
    """A file, in OpenAI's form."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class Files(ListPage):
    """A page of files."""

    data: list[File]


class Deleted(BaseModel):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def most_bytes(batch_bytes: int) -> int:
    """The most bytes of an uploaded form, where all files together may have `batch_bytes`."""
    return min(_MOST_BYTES, batch_bytes) + (1 << 16)


def _shown(stored: StoredFile) -> File:
    return File(
        id=stored.id,
        bytes=stored.n_bytes,
        created_at=stored.created_at,
        filename=stored.filename,
        purpose=stored.purpose,
    )


@dataclass
class _Upload:
    """Receives a form. `growing` is the file that its content is written to."""

    batches: Batches
    tenant: str
    purpose: str | None = None
    filename: str = ""
    growing: GrowingFile | None = None

    async def take(self, request: Request) -> StoredFile:
        async for part in read_form(request):
            if part.filename is None:
                self._take_field(part.name, part.data)
            elif part.name != "file":
                raise InvalidRequest(
                    f"{part.name[:100]!r} is not known here; the file is `file`", param="file"
                )
            elif not part.data:
                await self._begin(part.filename)
            else:
                assert self.growing is not None
                await self.batches.on_disk(partial(self.growing.write, part.data))
        if self.purpose is None:
            raise InvalidRequest("purpose is missing; it must be batch", param="purpose")
        if self.growing is None:
            raise InvalidRequest("file is missing", param="file")
        return await self.batches.on_disk(partial(self.growing.finish, self.filename, self.purpose))

    def _take_field(self, name: str, data: bytes) -> None:
        if name != "purpose":
            raise InvalidRequest(f"{name[:100]!r} is not known here; leave it out", param=name[:100])
        self.purpose = data.decode("utf-8", "replace")
        if self.purpose != "batch":
            message = f"purpose is {self.purpose[:100]!r}; files are for batches, so it must be batch"
            raise InvalidRequest(message, param="purpose")

    async def _begin(self, filename: str) -> None:
        if self.growing is not None:
            raise InvalidRequest("two files came; send one", param="file")
        self.filename = filename

        # Runs on the disk's thread. If this task is cancelled meanwhile, `drop` finds the file.
        def begin() -> None:
            self.growing = self.batches.files.begin(self.tenant)

        await self.batches.on_disk(begin)

    def drop(self) -> None:
        """Remove the file. Call it on the disk's thread, after all other work for the file."""
        if self.growing is not None:
            self.growing.abandon()


@router.post("", openapi_extra={"requestBody": _FORM}, responses=error_responses(400, 408, 413, 415, 429))
async def create_file(request: Request, batches: BatchesOf, tenant: FingerprintOf) -> File:
    """Upload a file of JSON lines, for a batch."""
    upload = _Upload(batches, tenant)
    try:
        return _shown(await upload.take(request))
    except BaseException:
        await batches.on_disk(upload.drop)
        raise


@router.get("", response_model=Files, responses=error_responses(400))
async def list_files(
    batches: BatchesOf,
    tenant: FingerprintOf,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    limit: Limit = 10_000,
    after: After = None,
    order: Order = "desc",
) -> Response:
    """List your files, the newest first."""
    if purpose is not None and purpose not in _PURPOSES:
        message = f"purpose is {purpose!r}; it must be one of {', '.join(_PURPOSES)}"
        raise InvalidRequest(message, param="purpose")

    def body() -> bytes:
        found = [one for one in batches.files.of(tenant) if purpose in (None, one.purpose)]
        ordered = found if order == "desc" else found[::-1]
        some, has_more = page(ordered, after, limit, lambda stored: stored.id)
        return listing([_shown(one).model_dump() for one in some], has_more)

    return Response(await batches.on_disk(body), media_type="application/json")


@router.get("/{file_id}", responses=error_responses(404))
async def get_file(batches: BatchesOf, tenant: FingerprintOf, file_id: str) -> File:
    """Describe a file."""
    return _shown(batches.files.get(file_id, tenant))


@router.get(
    "/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}, **error_responses(404)},
)
async def get_file_content(batches: BatchesOf, tenant: FingerprintOf, file_id: str) -> Response:
    """Download a file."""
    stored = batches.files.get(file_id, tenant)
    headers = {"content-length": str(stored.n_bytes)}
    return StreamingResponse(_pieces(batches, stored), media_type="application/octet-stream", headers=headers)


async def _pieces(batches: Batches, stored: StoredFile) -> AsyncIterator[bytes]:
    # Opened here: a client that is gone before the first piece leaves no open file.
    with await batches.on_disk(partial(batches.files.open, stored)) as file:
        while piece := await batches.on_disk(partial(file.read, _PIECE)):
            yield piece


@router.delete("/{file_id}", responses=error_responses(400, 404))
async def delete_file(batches: BatchesOf, tenant: FingerprintOf, file_id: str) -> Deleted:
    """Delete a file, unless it is the input of an unfinished batch."""
    await batches.delete_file(batches.files.get(file_id, tenant))
    return Deleted(id=file_id)
