"""`/tokenize` turns text or a conversation into token ids; `/detokenize` turns token ids into text."""

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from orca_jax.errors import InvalidRequest, TokenOutOfRange
from server.gateway.served_model import template_for
from server.gateway.side_threads import run_for_request
from server.http.bodies.errors import error_responses
from server.http.bodies.json_body import JsonRoute
from server.http.bodies.json_text import as_json
from server.http.fields.conversation import ConversationFields, Messages
from server.http.fields.strict import Strict
from server.http.generation.prepared_reply import rendered
from server.http.state import GatewayOf

router = APIRouter(tags=["tokens"], route_class=JsonRoute, responses=error_responses(404, 503))

_ONE_OF = {"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
_MODEL = Field(description="default: the served model")


class TokenizeRequest(ConversationFields, json_schema_extra=_ONE_OF):
    """POST /tokenize: either `prompt` or `messages`, the latter with the fields of a chat request."""

    model: Annotated[str | None, _MODEL] = None
    prompt: Annotated[str, Field(description="a text")] = ""
    messages: Annotated[Messages, Field(min_length=1, default_factory=list)]
    add_special_tokens: Annotated[
        bool | None,
        Field(description="default: true for prompt, false for messages: the chat template adds its own"),
    ] = None


class TokenizeResponse(BaseModel):
    """The tokens. `max_model_len` limits a request's tokens, input and output together."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: Annotated[str | None, _MODEL] = None
    tokens: Annotated[list[int], Field(description="token ids")]


class DetokenizeResponse(BaseModel):
    """The tokens' text, without special tokens."""

    prompt: str


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(gateway: GatewayOf, body: TokenizeRequest, request: Request) -> Response:
    """Tokenize a text, or a conversation as the chat template renders it."""
    model = gateway.model(body.model)
    given = body.model_fields_set & {"prompt", "messages"}
    if len(given) != 1:
        what = "neither prompt nor messages is given" if not given else "prompt and messages are both given"
        raise InvalidRequest(f"{what}; give one of them", param="messages" if given else "prompt")
    special = body.add_special_tokens
    param = given.pop()

    def read() -> bytes:
        if param == "prompt":
            tokens = model.encode(body.prompt, param=param, add_special_tokens=special is not False)
        else:
            template = template_for(model, body.chat_template, has_tools=bool(body.tools))
            tokens = model.encode(rendered(template, body), param=param, add_special_tokens=special is True)
        longest = model.service.most_output(0)
        whole = {"tokens": tokens, "count": len(tokens), "max_model_len": longest}
        return as_json(whole, 4 * len(tokens)).encode()

    return _json(await run_for_request(len(await request.body()), read))


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(gateway: GatewayOf, body: DetokenizeRequest, request: Request) -> Response:
    """Turn token ids into text. Bytes that are not valid UTF-8 become U+FFFD."""
    model = gateway.model(body.model)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InvalidRequest(f"{model.name} has no tokenizer, so tokens have no text", param="tokens")
    n_vocabulary = model.config.vocab_size

    def read() -> bytes:
        for i, token in enumerate(body.tokens):
            if not 0 <= token < n_vocabulary and tokenizer.token_name(token) is None:
                message = f"tokens.{i} is {token}; it must be from 0 to {n_vocabulary - 1}"
                raise TokenOutOfRange(message, param=f"tokens.{i}")
        return as_json({"prompt": tokenizer.decode(body.tokens)}, ascii=False).encode()

    return _json(await run_for_request(len(await request.body()), read))


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
