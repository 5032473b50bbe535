"""FastAPI dependencies of these routes, and how their lists are cut into pages."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

from fastapi import APIRouter, Depends, Query, Request

from orca_jax.errors import InvalidRequest
from server.batches.service import Batches
from server.errors import BatchesOff


async def _batches(request: Request) -> Batches:
    return request.app.state.batches


async def _fingerprint(request: Request) -> str:
    return request.app.state.fingerprint(request.scope["state"]["tenant"])


BatchesOf = Annotated[Batches, Depends(_batches)]
FingerprintOf = Annotated[str, Depends(_fingerprint)]  # of the API key, "" without keys

Limit = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[str | None, Query(description="the last id of the page before", max_length=256)]
Order = Annotated[Literal["asc", "desc"], Query(description="by the time when it was made")]


class HasId(Protocol):
    """What lists are made of."""

    @property
    def id(self) -> str: ...


One = TypeVar("One", bound=HasId)


def page(every: Sequence[One], after: str | None, limit: int) -> tuple[list[One], bool]:
    """Up to `limit` of them after the one with the id `after`, and whether there are more."""
    first = 0
    if after is not None:
        places = [i for i, one in enumerate(every) if one.id == after]
        if not places:
            raise InvalidRequest(f"after is {after[:100]!r}, and none has that id", param="after")
        first = places[0] + 1
    return list(every[first : first + limit]), first + limit < len(every)


def listing(data: Sequence[dict[str, Any]], has_more: bool) -> bytes:
    """OpenAI's list as JSON. Each entry is written by itself, so that no call holds the GIL for long."""
    ids = [one["id"] for one in data]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None, "has_more": has_more}
    entries = ",".join([json.dumps(one, ensure_ascii=False) for one in data])
    return f'{{"object":"list","data":[{entries}],{json.dumps(ends)[1:]}'.encode()


def off_router() -> APIRouter:
    """The routes of a server without a folder for them: each says how to turn them on."""
    router = APIRouter(include_in_schema=False)

    async def off() -> None:
        message = (
            "this server keeps no files and runs no batches; orca serve --batch-dir FOLDER turns them on"
        )
        raise BatchesOff(message)

    for path in ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}"):
        router.add_api_route(path, off, methods=["GET", "POST", "DELETE"])
    return router
