"""Stored responses: `GET` and `DELETE /v1/responses/{response_id}`, and the items of its input."""

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from server.gateway.side_threads import run_for_response
from server.http.bodies.errors import error_responses
from server.http.bodies.json_text import parse
from server.http.bodies.lists import ListPage, listing, page
from server.http.fields.strict import NotBuilt, Unused, take_fields
from server.http.responses.items import Item
from server.http.responses.store import ResponseStore
from server.http.state import TenantOf


class InputTokensDetails(BaseModel):
    """Input tokens whose keys and values were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Output tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """A response. It also has the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: Annotated[int, Field(description="in seconds since 1970")]
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    incomplete_details: dict[str, Any] | None
    error: dict[str, Any] | None
    model: str
    output: Annotated[
        list[dict[str, Any]], Field(description="items of type message, reasoning or function_call")
    ]
    previous_response_id: str | None
    store: Annotated[bool, Field(description="whether it can be retrieved and continued")]
    usage: ResponseUsage | None


class ResponseItems(ListPage):
    """A page of the items of a stored response's input."""

    data: list[dict[str, Any]]


class DeletedResponse(BaseModel):
    """The answer to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


_ID = "response_id"
_JSON = "application/json"


async def _store(request: Request) -> ResponseStore:
    return request.app.state.responses


StoreOf = Annotated[ResponseStore, Depends(_store)]

router = APIRouter(prefix="/v1/responses", tags=["responses"], responses=error_responses(400, 404))


class _Query(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResponseQuery(_Query):
    """The query of GET /v1/responses/{response_id}."""

    include: Annotated[list[str], NotBuilt([], why="they are not kept")] = Field(default_factory=list[str])
    stream: Annotated[bool, NotBuilt(False, why="the response comes whole")] = False
    starting_after: Annotated[int | None, NotBuilt(why="the response comes whole")] = None
    include_obfuscation: Annotated[bool, NotBuilt(False, why="nothing is padded")] = False


class ItemsQuery(_Query):
    """The query of GET /v1/responses/{response_id}/input_items."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str | None, Field(description="the items after the one with this id")] = None
    include: Annotated[list[str], NotBuilt([], why="they are not kept")] = Field(default_factory=list[str])


@router.get("/{response_id}", response_class=Response, responses={200: {"model": ResponseObject}})
async def get_response(
    response_id: str, query: Annotated[ResponseQuery, Query()], store: StoreOf, tenant: TenantOf
) -> Response:
    """Get a stored response."""
    take_fields(query, Unused())
    return Response(store.get(response_id, tenant, param=_ID).response, media_type=_JSON)


@router.delete("/{response_id}")
async def delete_response(response_id: str, store: StoreOf, tenant: TenantOf) -> DeletedResponse:
    """Delete a stored response. Responses that continue it keep the whole conversation."""
    store.delete(response_id, tenant, param=_ID)
    return DeletedResponse(id=response_id)


@router.get("/{response_id}/input_items", response_class=Response, responses={200: {"model": ResponseItems}})
async def list_input_items(
    response_id: str, query: Annotated[ItemsQuery, Query()], store: StoreOf, tenant: TenantOf
) -> Response:
    """List the items that the model read, including those of earlier responses."""
    take_fields(query, Unused())
    entry = store.get(response_id, tenant, param=_ID)
    work = partial(_page, entry.items, entry.n_input, query)
    return Response(await run_for_response(len(entry.items), work), media_type=_JSON)


def _page(data: bytes, n_input: int, query: ItemsQuery) -> bytes:
    items: list[Item] = parse(data)[:n_input]
    if query.order == "desc":
        items.reverse()
    some, has_more = page(items, query.after, query.limit, lambda item: item["id"])
    return listing(some, has_more, len(data))
