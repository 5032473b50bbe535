"""What both generating routes do, before they make prompts of a request and after it is done."""

import time
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import Response
from pydantic import BaseModel
from starlette.types import Receive

import orca_jax
from server.beside import beside
from server.gateway import Gateway
from server.http.choices import Choices, Whole
from server.http.chunks import ChunkShape, ChunkWriter
from server.http.errors import error_responses
from server.http.event_stream import EventStream
from server.http.not_built import refuse_what_is_not_built
from server.http.protocol import GenerationRequest, StreamOptions
from server.http.token_places import n_characters
from server.served_model import ServedModel

GENERATION_ERRORS = error_responses(404, 429, 500, 503, 504)

Finished = Callable[[dict[str, Any], Choices, list[Whole]], BaseModel]


def accept(body: GenerationRequest, gateway: Gateway, facts: dict[str, Any]) -> ServedModel:
    """The model for a request, once nothing in it asks for what is not built.

    Raises InvalidRequest, UnknownModel, NotReady or EngineError.
    """
    refuse_what_is_not_built(body)
    body.check_stream_options()
    if body.user is not None:
        facts["user"] = body.user
    return gateway.model(body.model)


def new_response_id(prefix: str) -> str:
    """A name for a response that no other has; its requests in the service are called after it."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def answer(
    body: GenerationRequest,
    model: ServedModel,
    choices: Choices,
    receive: Receive,
    *,
    shape: ChunkShape,
    finished: Finished,
) -> Response:
    """Generate the choices: a stream, or what `finished(head, choices, wholes)` makes when all are complete.

    `head` are the fields that every object of the response begins with.
    """
    head = {
        "id": choices.response_id,
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": f"orca_jax-{orca_jax.__version__}",
    }
    if body.stream:
        options = body.stream_options or StreamOptions()
        chunks = ChunkWriter(shape, head, len(choices), include_usage=bool(options.include_usage))
        return EventStream(choices, chunks, options, has_text=model.tokenizer is not None)
    wholes = await choices.wholes(receive)
    n = sum(n_characters(whole.tokens) for whole in wholes)
    content = await beside(n, lambda: finished(head, choices, wholes).model_dump_json())
    return Response(content, media_type="application/json")
