"""Chunks of a stream, as bytes: what stays the same is written once, and per piece only its text, with
log-probabilities where they are asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from orca_jax.errors import OrcaError
from orca_jax.request.request import FinishReason
from orca_jax.service.generation import Piece
from server.http.bodies.errors import error_body
from server.http.bodies.json_answer import as_json
from server.http.fields.both import Usage

DONE = b"data: [DONE]\n\n"

# All is ASCII, so that no reader takes a character of the text for the end of a line.


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """How a choice's text stands in a chunk: between `before` (`first` in its first one) and `after`."""

    object: str
    first: str
    before: str
    after: str


TEXT_CHUNK = ChunkShape("text_completion", '"text":', '"text":', "")
CHAT_CHUNK = ChunkShape(
    "chat.completion.chunk", '"delta":{"role":"assistant","content":', '"delta":{"content":', "}"
)


class ChunkWriter:
    """Writes the chunks of one response as server-sent events.

    `head` has the fields that all of them share. With `include_usage` every chunk has a `usage`, which is
    null where none is given.
    """

    def __init__(
        self, shape: ChunkShape, head: Mapping[str, object], n_choices: int, *, include_usage: bool
    ) -> None:
        fields = as_json({**head, "object": shape.object})
        self._head = "data: " + fields.removesuffix("}")
        choices = [f'{self._head},"choices":[{{"index":{i},' for i in range(n_choices)]
        self._before = [start + shape.first for start in choices]
        self._before_later = [start + shape.before for start in choices]
        reasons = [None, FinishReason.STOP, FinishReason.LENGTH]
        self._reason = {reason: f',"finish_reason":{as_json(reason)}}}]' for reason in reasons}
        self._logprobs = f'{shape.after},"logprobs":'
        self._after = {reason: f"{self._logprobs}null{end}" for reason, end in self._reason.items()}
        self._no_usage = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def chunk(
        self, index: int, piece: Piece, usage: Usage | None = None, logprobs: str | None = None
    ) -> bytes:
        """A piece of choice `index`; `logprobs` is JSON."""
        before = self._before[index]
        self._before[index] = self._before_later[index]
        after = self._after[piece.finish_reason]
        if logprobs is not None:
            after = f"{self._logprobs}{logprobs}{self._reason[piece.finish_reason]}"
        end = self._no_usage if usage is None else _with(usage)
        return f"{before}{as_json(piece.text)}{after}{end}".encode("ascii")

    def usage(self, usage: Usage) -> bytes:
        """The chunk behind all choices, with the usage of all."""
        return f'{self._head},"choices":[]{_with(usage)}'.encode("ascii")


def error_event(error: OrcaError) -> bytes:
    """What ended a stream before its end; clients raise it, and expect nothing behind it."""
    return f"data: {as_json(error_body(error))}\n\n".encode("ascii")


def _with(usage: Usage) -> str:
    return f',"usage":{usage.model_dump_json()}}}\n\n'
