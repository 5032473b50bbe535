"""`POST /v1/messages`: Anthropic's protocol. The model replies to a conversation.

`/v1/messages/count_tokens` counts the tokens of its prompt.
"""

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from server.gateway.side_threads import run_for_request
from server.http.bodies.errors import MESSAGES, MessagesErrorBody, error_responses
from server.http.bodies.json_body import JsonRoute
from server.http.fields.generation import renamed_fields
from server.http.generation.answer import new_id
from server.http.generation.choices import Choices
from server.http.generation.event_writer import reply
from server.http.generation.prepared_reply import prepared, prompt_of
from server.http.messages.conversation import conversation_of
from server.http.messages.fields import CountTokensRequest, MessageRequest
from server.http.messages.writer import MessageWriter
from server.http.state import CallOf, GatewayOf, UnusedOf

router = APIRouter(route_class=JsonRoute, tags=["messages"])


class MessageUsage(BaseModel):
    """Token counts. `input_tokens` leaves out the tokens found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(BaseModel):
    """The reply. Its content is a list of blocks of type text, thinking or tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The number of tokens in a prompt."""

    input_tokens: int


@router.post(
    MESSAGES,
    response_class=Response,
    responses={
        200: {"model": Message, "content": {"text/event-stream": {}}},
        **error_responses(404, 429, 500, 503, 504, form=MessagesErrorBody),
    },
)
async def create_message(body: MessageRequest, call: CallOf) -> Response:
    """Reply to a conversation, in one response or, with `stream`, as server-sent events."""
    body.check()
    model = call.accept(body.scheduling, model=body.model, user=body.user)
    ready = await prepared(call, model, body, lambda: conversation_of(body, model, call.unused))
    message_id = new_id("msg")
    choices = Choices(call, [ready.prompt], ready.rules, extras=None, response_id=message_id, plan=ready.plan)
    writer = MessageWriter(message_id, model.name, n_input=ready.prompt.n_input, max_tokens=body.max_tokens)
    return await reply(choices, writer, call.receive, stream=bool(body.stream))


@router.post(f"{MESSAGES}/count_tokens", responses=error_responses(404, 429, 503, form=MessagesErrorBody))
async def count_tokens(
    body: CountTokensRequest, request: Request, gateway: GatewayOf, unused: UnusedOf
) -> TokenCount:
    """Count the tokens of a message's prompt."""
    body.check()
    model = gateway.model(body.model)

    def count() -> int:
        with renamed_fields(**body.client_names):
            conversation = conversation_of(body, model, unused)
            body.wish(conversation.tools or ())  # names the tools' fields in errors
            _, prompt = prompt_of(model, body, conversation, unused)
        return len(prompt)

    return TokenCount(input_tokens=await run_for_request(len(await request.body()), count))
