"""What both generating routes do, before they make prompts of a request and after it is done."""

import time
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import Response
from starlette.types import Receive

import orca_jax
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_response
from server.http.bodies.errors import error_responses
from server.http.bodies.json_answer import as_json
from server.http.fields.both import GenerationRequest, StreamOptions
from server.http.fields.token_places import n_characters
from server.http.generation.choices import Choices, Whole
from server.http.generation.chunks import ChunkShape, ChunkWriter
from server.http.generation.event_stream import EventStream

GENERATION_ERRORS = error_responses(404, 429, 500, 503, 504)

Finished = Callable[[Choices, list[Whole]], list[dict[str, Any]]]


def accept(body: GenerationRequest, gateway: Gateway, facts: dict[str, Any]) -> ServedModel:
    """The model for a request. Raises InvalidRequest, UnknownModel, NotReady or EngineError."""
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
    object_name: str,
    finished: Finished,
) -> Response:
    """Generate the choices: a stream, or when all are complete an `object_name` with what `finished` makes of
    them.
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
    n = sum(n_characters(whole.tokens) + len(whole.text) for whole in wholes)

    def write() -> bytes:
        usage = choices.tally.usage().model_dump()
        whole = {**head, "object": object_name, "choices": finished(choices, wholes), "usage": usage}
        return as_json(whole, n, ascii=False).encode()

    return Response(await run_for_response(n, write), media_type="application/json")
