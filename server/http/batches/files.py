"""`/v1/files`: clients' files, which batches read and write."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from orca_jax.errors import InvalidRequest
from server.batches.files import GrowingFile, StoredFile
from server.batches.service import Batches
from server.http.bodies.errors import error_responses
from server.http.bodies.lists import After, Limit, ListPage, Order, listing, page
from server.http.state import BatchesOf, FingerprintOf

_MAX_FIELD = 4096  # bytes of a field other than the file
_MAX_PARTS = 16  # the parser bounds each part's headers


class Part(NamedTuple):
    """A field's whole value, or a piece of the file; the file's first piece is empty."""

    name: str
    filename: str | None  # None for a field
    data: bytes


class _Reader:
    """Collects the form's parts from the parser's callbacks, in `parts`."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.ended = False
        self._header, self._value = bytearray(), bytearray()
        self._name = ""
        self._filename: str | None = None
        self._field = bytearray()
        self._n_parts = 0

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            filename = options.get(b"filename")
            self._filename = None if filename is None else filename.decode("utf-8", "replace")
        self._header.clear()
        self._value.clear()

    def part_begin(self) -> None:
        self._name, self._filename = "", None
        self._field.clear()
        self._n_parts += 1
        if self._n_parts > _MAX_PARTS:
            raise InvalidRequest(f"the form has over {_MAX_PARTS} parts; send purpose and file", param="file")

    def headers_finished(self) -> None:
        if self._filename is not None:
            self.parts.append(Part(self._name, self._filename, b""))

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if self._filename is not None:
            self.parts.append(Part(self._name, self._filename, data[start:end]))
            return
        self._field += data[start:end]
        if len(self._field) > _MAX_FIELD:
            message = f"the field {self._name[:100]!r} has more than {_MAX_FIELD} bytes"
            raise InvalidRequest(message, param=self._name[:100])

    def part_end(self) -> None:
        if self._filename is None:
            self.parts.append(Part(self._name, None, bytes(self._field)))

    def end(self) -> None:
        self.ended = True


async def read_form(request: Request) -> AsyncIterator[Part]:
    """The form's parts as they arrive. Raises HTTPException 400 or 415, and InvalidRequest."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        problem = "the body must be a form with a file; send it as multipart/form-data with a boundary"
        raise HTTPException(415, problem)
    reader = _Reader()
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": reader.part_begin,
                "on_part_data": reader.part_data,
                "on_part_end": reader.part_end,
                "on_header_field": reader.header_field,
                "on_header_value": reader.header_value,
                "on_header_end": reader.header_end,
                "on_headers_finished": reader.headers_finished,
                "on_end": reader.end,
            },
        )
        async for chunk in request.stream():
            parser.write(chunk)
            parts, reader.parts = reader.parts, []
            for part in parts:
                yield part
    except FormParserError as error:
        raise HTTPException(400, f"the body is not a form that can be read: {error!s:.200}") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the client left before its body was complete") from error
    if not reader.ended:
        raise HTTPException(400, "the body is not a whole form: its last boundary is missing")


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
