"""`POST /v1/responses`: the model replies to a conversation, which may continue a stored response."""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Response

from orca_jax.errors import InvalidRequest
from orca_jax.request.sampling_params import SamplingParams
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_response
from server.http.bodies.errors import RESPONSES
from server.http.bodies.json_body import JsonRoute
from server.http.bodies.json_text import as_json, excess_of, parse
from server.http.fields.conversation import ConversationFields
from server.http.fields.logprobs import PlacedToken, TokenNames, chat_logprobs
from server.http.generation.answer import GENERATION_ERRORS, new_id
from server.http.generation.choices import Choices, OutputExtras
from server.http.generation.event_writer import reply
from server.http.generation.prepared_reply import prepared
from server.http.responses.fields import ResponseRequest
from server.http.responses.items import Item, ItemReference, kept_items, messages_of
from server.http.responses.store import ResponseStore, StoredResponse
from server.http.responses.stored import ResponseObject, StoreOf
from server.http.responses.tools import FunctionTool
from server.http.responses.writer import ResponseWriter
from server.http.state import CallOf

router = APIRouter(route_class=JsonRoute, tags=["responses"])


@router.post(
    RESPONSES,
    response_class=Response,
    responses={200: {"model": ResponseObject, "content": {"text/event-stream": {}}}, **GENERATION_ERRORS},
)
async def create_response(body: ResponseRequest, call: CallOf, store: StoreOf) -> Response:
    """Reply to a conversation, in one response or, with `stream`, as server-sent events."""
    body.check()
    model = call.accept(body.scheduling, model=body.model, user=body.user)
    exchange = _Exchange(body, store, call.tenant, call.owner)
    ready = await prepared(call, model, body, exchange.conversation, n_earlier_bytes=exchange.n_earlier_bytes)
    names = TokenNames(model.tokenizer)

    def write_logprobs(tokens: Sequence[PlacedToken]) -> list[dict[str, Any]]:
        return _without_nulls(chat_logprobs(tokens, names)["content"])

    extras = None
    if body.with_logprobs:
        extras = OutputExtras(names=names, shown=ready.rules.shown, write_logprobs=chat_logprobs)
    choices = Choices(
        call, [ready.prompt], ready.rules, extras=extras, response_id=exchange.response_id, plan=ready.plan
    )
    head = _head(body, model, exchange, ready.rules.sampling)
    writer = ResponseWriter(head, call.n_bytes, write_logprobs, exchange.keep, body.offered.called)
    return await reply(choices, writer, call.receive, stream=bool(body.stream))


class _Exchange:
    """Connects one request with the store: the conversation that it continues, and the response to store."""

    def __init__(self, body: ResponseRequest, store: ResponseStore, tenant: str, owner: str) -> None:
        """Raises InvalidRequest, and UnknownResponse if the response to continue is not stored."""
        self.response_id = new_id("resp")
        self.stores = not store.is_off if body.store is None else body.store
        self._body = body
        self._store = store
        self._tenant, self._owner = tenant, owner
        self._items: list[Item] = []
        self._earlier: StoredResponse | None = None
        previous = body.previous_response_id
        for name, asked in (("store", body.store), ("previous_response_id", previous)):
            if asked and store.is_off:
                message = f"{name} is given, but this server stores no responses; send the whole conversation"
                raise InvalidRequest(f"{message} as input", param=name)
        if previous is not None:
            self._earlier = store.get(previous, tenant, param="previous_response_id")
        self._referred = dict[
            str, StoredResponse
        ]()  # by id, the responses with items that the input refers to
        given: Any = body.input if isinstance(body.input, list) else ()
        for i, item in enumerate(given):
            if isinstance(item, ItemReference):
                found = store.holding(item.id, tenant, param=f"input.{i}.id")
                self._referred[found.response_id] = found
        n = sum(len(found.items) for found in self._referred.values())
        if n > store.largest:
            message = f"the items that input refers to are in conversations of {n} bytes; at most "
            raise InvalidRequest(
                f"{message}{store.largest} are read, so send the items themselves", param="input"
            )

    @property
    def n_earlier_bytes(self) -> int:
        read = [*self._referred.values(), *([] if self._earlier is None else [self._earlier])]
        return sum(len(entry.items) for entry in read)

    def conversation(self) -> ConversationFields:
        """The whole conversation, earlier responses included. Raises InvalidRequest."""
        earlier: list[Item] = [] if self._earlier is None else parse(self._earlier.items)
        referred = {item["id"]: item for entry in self._referred.values() for item in parse(entry.items)}
        new = kept_items(self._body.input, referred)
        if not new:
            raise InvalidRequest("input is an empty list; give at least one item", param="input")
        self._items = [*earlier, *new]
        if self.stores:
            self._check_size()
        messages = messages_of(self._body.instructions, self._items, len(earlier))
        return ConversationFields(messages=messages, tools=self._body.offered.functions or None)

    async def keep(self, response: dict[str, Any], n: int) -> bool:
        """Store the complete response of about `n` characters. False if it is not wanted, or too large."""
        if not self.stores:
            return False

        def entry() -> StoredResponse:
            output = [_without_logprobs(item) for item in response["output"]]
            items = [*self._items, *output]
            return StoredResponse(
                response_id=self.response_id,
                tenant=self._tenant,
                owner=self._owner,
                response=as_json({**response, "store": True}, n, ascii=False).encode(),
                items=self._items_json(items, n),
                n_input=len(self._items),
                item_ids=[item["id"] for item in items],
            )

        stored = await run_for_response(n + self.n_earlier_bytes, entry)
        return excess_of(stored.items) is None and self._store.put(stored)

    def _items_json(self, items: Sequence[Item], n: int) -> bytes:
        return as_json(items, n + self.n_earlier_bytes, ascii=False).encode()

    def _check_size(self) -> None:
        data = self._items_json(self._items, 0)
        excess = excess_of(data)
        if len(data) > self._store.largest:
            excess = f"{len(data)} bytes, more than the {self._store.largest} that one response may take"
        if excess is not None:
            message = f"the conversation has {excess}, so it cannot be stored; set store to false"
            raise InvalidRequest(message, param="store")


def _head(
    body: ResponseRequest, model: ServedModel, exchange: _Exchange, sampling: SamplingParams
) -> dict[str, Any]:
    """The response before its output: fields that the request decides, and initial values."""
    text = {} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    nulls = {"description": None, "strict": None, "parameters": None}
    tools = [
        {**(nulls if isinstance(tool, FunctionTool) else {}), **tool.model_dump(exclude_none=True)}
        for tool in body.tools or ()
    ]
    choice = body.tool_choice or "auto"
    reasoning: dict[str, Any] = {"effort": None, "summary": None}
    if body.reasoning is not None:
        reasoning["effort"] = body.reasoning.effort
    head: dict[str, Any] = {
        "id": exchange.response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": reasoning,
        "service_tier": "default",
        "store": exchange.stores,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium", **text},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
    return {**head, "weights_version": None} if model.shows_versions else head


def _without_nulls(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace null by an empty list for the bytes of a token without text, as the API requires."""
    for entry in logprobs:
        for token in (entry, *entry["top_logprobs"]):
            token["bytes"] = token["bytes"] or []
    return logprobs


def _without_logprobs(item: Item) -> Item:
    if item["type"] != "message":
        return item
    parts = [{key: value for key, value in part.items() if key != "logprobs"} for part in item["content"]]
    return {**item, "content": parts}
