"""Stored responses: `GET` and `DELETE /v1/responses/{response_id}`, and the items of its input."""

from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from orca_jax.errors import InvalidRequest
from server.gateway.side_threads import run_for_response
from server.http.bodies.errors import error_responses
from server.http.bodies.json_answer import as_json
from server.http.bodies.json_text import parse
from server.http.fields.not_built import NotBuilt
from server.http.fields.strict import take_fields
from server.http.fields.unused import Unused
from server.http.generation.state import TenantOf
from server.http.responses.items import Item
from server.http.responses.objects import DeletedResponse, ResponseItems, ResponseObject
from server.http.responses.store import ResponseStore

_ID = "response_id"
_JSON = "application/json"


async def _store(request: Request) -> ResponseStore:
    return request.app.state.responses


StoreOf = Annotated[ResponseStore, Depends(_store)]

router = APIRouter(prefix="/v1/responses", tags=["responses"], responses=error_responses(400, 404))


class _Query(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResponseQuery(_Query):
    """Of GET /v1/responses/{response_id}."""

    include: Annotated[list[str], NotBuilt([], why="they are not kept")] = Field(default_factory=list[str])
    stream: Annotated[bool, NotBuilt(False, why="the response comes whole")] = False
    starting_after: Annotated[int | None, NotBuilt(why="the response comes whole")] = None
    include_obfuscation: Annotated[bool, NotBuilt(False, why="nothing is padded")] = False


class ItemsQuery(_Query):
    """Of GET /v1/responses/{response_id}/input_items."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str | None, Field(description="the items after the one with this id")] = None
    include: Annotated[list[str], NotBuilt([], why="they are not kept")] = Field(default_factory=list[str])


@router.get("/{response_id}", response_class=Response, responses={200: {"model": ResponseObject}})
async def get_response(
    response_id: str, query: Annotated[ResponseQuery, Query()], store: StoreOf, tenant: TenantOf
) -> Response:
    """A stored response."""
    take_fields(query, Unused())
    return Response(store.get(response_id, tenant, param=_ID).response, media_type=_JSON)


@router.delete("/{response_id}")
async def delete_response(response_id: str, store: StoreOf, tenant: TenantOf) -> DeletedResponse:
    """Drop a stored response at once. Those that went on from it keep the whole conversation."""
    store.delete(response_id, tenant, param=_ID)
    return DeletedResponse(id=response_id)


@router.get("/{response_id}/input_items", response_class=Response, responses={200: {"model": ResponseItems}})
async def list_input_items(
    response_id: str, query: Annotated[ItemsQuery, Query()], store: StoreOf, tenant: TenantOf
) -> Response:
    """The items that the model read, those of earlier responses included."""
    take_fields(query, Unused())
    entry = store.get(response_id, tenant, param=_ID)
    work = partial(_page, entry.items, entry.n_input, query)
    return Response(await run_for_response(len(entry.items), work), media_type=_JSON)


def _page(data: bytes, n_input: int, query: ItemsQuery) -> bytes:
    items: list[Item] = parse(data)[:n_input]
    if query.order == "desc":
        items.reverse()
    first = 0
    if query.after is not None:
        first = next((i for i, item in enumerate(items, 1) if item["id"] == query.after), 0)
        if not first:
            message = f"after is {query.after[:80]!r}; no item has that id"
            raise InvalidRequest(message, param="after")
    page = list(islice(items, first, first + query.limit))
    whole: dict[str, Any] = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + len(page) < len(items),
    }
    return as_json(whole, len(data), ascii=False).encode()
