"""What both generating routes do once their choices are made: answer whole, or as a stream."""

from collections.abc import Callable
from typing import Any

from fastapi import Response
from pydantic import BaseModel
from starlette.types import Receive

import orca_jax
from server.http.choices import Choices
from server.http.chunks import ChunkShape, ChunkWriter
from server.http.errors import error_responses
from server.http.event_stream import EventStream
from server.http.protocol import GenerationRequest, StreamOptions
from server.served_model import ServedModel

_CLIENT_LEFT = 499  # nobody reads it; the access log has it


def answers(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """A generating route's `responses`: `whole`, or a stream of events, or one of the errors."""
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    complete = {"model": whole, "content": events, "description": "Complete; events where `stream` is true"}
    return {200: complete, **error_responses(404, 429, 503, 504)}


class Answer:
    """The choices of one response, and the fields that its answer and all its chunks share, `head`."""

    def __init__(self, choices: Choices, model: ServedModel, *, created: int, shape: ChunkShape) -> None:
        self.choices = choices
        self.has_text = model.tokenizer is not None
        self.shape = shape
        self.head: dict[str, Any] = {
            "id": choices.response_id,
            "created": created,
            "model": model.name,
            "system_fingerprint": f"orca_jax-{orca_jax.__version__}",
        }


async def respond(
    answer: Answer,
    request: GenerationRequest,
    receive: Receive,
    whole: Callable[[list[str]], BaseModel],
) -> Response:
    """The response; `whole` makes one of every choice's text. Raises what ends the request before that."""
    if request.stream:
        options = request.stream_options or StreamOptions()
        writer = ChunkWriter(
            answer.shape, answer.head, len(answer.choices), include_usage=bool(options.include_usage)
        )
        return EventStream(answer.choices, writer, options, has_text=answer.has_text)
    texts = await answer.choices.texts(receive)
    if texts is None:
        return Response(status_code=_CLIENT_LEFT)
    return Response(whole(texts).model_dump_json(), media_type="application/json")
