"""What both generation routes share: accepting a request and writing its response."""

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
from server.http.generation.choices import Choices, CompleteChoice
from server.http.generation.chunks import ChunkShape, ChunkWriter
from server.http.generation.event_stream import EventStream

GENERATION_ERRORS = error_responses(404, 429, 500, 503, 504)

ChoicesWriter = Callable[[Choices, list[CompleteChoice]], list[dict[str, Any]]]


def accept(body: GenerationRequest, gateway: Gateway, facts: dict[str, Any]) -> ServedModel:
    """The model for the request. Raises InvalidRequest, UnknownModel, NotReady or EngineError."""
    body.check_stream_options()
    if body.user is not None:
        facts["user"] = body.user
    return gateway.model(body.model)


def new_response_id(prefix: str) -> str:
    """A unique response id. The ids of its requests in the service are derived from it."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def answer(
    body: GenerationRequest,
    model: ServedModel,
    choices: Choices,
    receive: Receive,
    *,
    shape: ChunkShape,
    object_name: str,
    write_choices: ChoicesWriter,
) -> Response:
    """Generate the choices: as a stream, or as one JSON object when all are complete.

    The `object` field of that JSON is `object_name`, and `write_choices` makes its `choices`. `shape` is the
    form of a stream's chunks.
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
    complete = await choices.complete(receive)
    n = sum(n_characters(choice.tokens) + len(choice.text) for choice in complete)

    def write() -> bytes:
        usage = choices.tally.usage().model_dump()
        written = write_choices(choices, complete)
        whole = {**head, "object": object_name, "choices": written, "usage": usage}
        return as_json(whole, n, ascii=False).encode()

    return Response(await run_for_response(n, write), media_type="application/json")
