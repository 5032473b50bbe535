"""Writes the chunks of a stream as bytes. The constant parts are encoded once per response; for each piece
only its text and any log-probabilities are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orca_jax.errors import OrcaError
from orca_jax.request.request import FinishReason
from orca_jax.service.output import Piece
from server.http.bodies.error_forms import body_at
from server.http.bodies.errors import trouble_of
from server.http.bodies.json_answer import as_json
from server.http.fields.generation import Usage

DONE = b"data: [DONE]\n\n"
RESPONSES = "/v1/responses"
TOOL_CALLS = "tool_calls"  # the finish reason of a reply with calls

# Everything is ASCII, so that no client mistakes a Unicode character for a line break.


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """The JSON around a choice's text in a chunk: `before` (`first` in the first chunk) and `after`."""

    object: str
    first: str
    before: str
    after: str


TEXT_CHUNK = ChunkShape("text_completion", '"text":', '"text":', "")
CHAT_CHUNK = ChunkShape(
    "chat.completion.chunk", '"delta":{"role":"assistant","content":', '"delta":{"content":', "}"
)


class ChoiceEnd(NamedTuple):
    """How a choice of a chat ended."""

    reason: FinishReason | str
    weights_version: int | None


class ChunkWriter:
    """Writes the chunks of one response as server-sent events.

    `head` has the fields that all chunks share. With `include_usage` every chunk has a `usage`, which is null
    unless one is given. With `versions` the last chunk of a choice has the version of the weights.
    """

    def __init__(
        self,
        shape: ChunkShape,
        head: Mapping[str, object],
        n_choices: int,
        *,
        include_usage: bool,
        versions: bool = False,
    ) -> None:
        fields = as_json({**head, "object": shape.object})
        self._head = "data: " + fields.removesuffix("}")
        choices = [f'{self._head},"choices":[{{"index":{i},' for i in range(n_choices)]
        self._before = [start + shape.first for start in choices]
        self._before_later = [start + shape.before for start in choices]
        self._starts = [f'{start}"delta":' for start in choices]
        self._n_deltas = [0] * n_choices
        reasons = [None, FinishReason.STOP, FinishReason.LENGTH, TOOL_CALLS]
        self._reason = {reason: f',"finish_reason":{as_json(reason)}}}]' for reason in reasons}
        self._logprobs = f'{shape.after},"logprobs":'
        self._after = {reason: f"{self._logprobs}null{end}" for reason, end in self._reason.items()}
        self._versions = versions
        self._no_usage = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def chunk(
        self,
        index: int,
        piece: Piece,
        usage: Usage | None = None,
        logprobs: str | None = None,
        routed: str | None = None,
    ) -> bytes:
        """The chunk for a piece of choice `index`. `logprobs` and `routed`, of the last one, are JSON."""
        before = self._before[index]
        self._before[index] = self._before_later[index]
        after = self._after[piece.finish_reason]
        if logprobs is not None:
            after = f"{self._logprobs}{logprobs}{self._reason[piece.finish_reason]}"
        if self._versions and piece.finish_reason is not None:
            after = f'{after.removesuffix("}]")},"weights_version":{piece.weights_version}}}]'
        if routed is not None:
            after = f'{after.removesuffix("}]")},"routed_experts":{routed}}}]'
        end = self._no_usage if usage is None else _usage_end(usage)
        return f"{before}{as_json(piece.text)}{after}{end}".encode("ascii")

    def deltas(
        self,
        index: int,
        deltas: Sequence[Mapping[str, object]],
        end: ChoiceEnd | None,
        usage: Usage | None = None,
        logprobs: str | None = None,
        routed: str | None = None,
    ) -> bytes:
        """A chunk for each of a chat choice's deltas, the first with its role and the first of these with
        `logprobs`, and one for its `end`, with `routed`.
        """
        shown = [*deltas] if deltas or logprobs is None else [{}]
        if shown and not self._n_deltas[index]:
            shown[0] = {"role": "assistant", "content": None, **shown[0]}
        self._n_deltas[index] += len(shown)
        usage_end = self._no_usage if usage is None else _usage_end(usage)
        chunks = list[str]()
        for delta in shown:
            chunks.append(self._delta(index, delta, logprobs, f"{self._reason[None]}{usage_end}"))
            logprobs = None
        if end is not None:
            after = self._reason[end.reason]
            if self._versions:
                after = f'{after.removesuffix("}]")},"weights_version":{end.weights_version}}}]'
            if routed is not None:
                after = f'{after.removesuffix("}]")},"routed_experts":{routed}}}]'
            chunks.append(self._delta(index, {}, None, f"{after}{usage_end}"))
        return "".join(chunks).encode("ascii")

    def _delta(self, index: int, delta: Mapping[str, object], logprobs: str | None, end: str) -> str:
        return f'{self._starts[index]}{as_json(delta)},"logprobs":{logprobs or "null"}{end}'

    def usage(self, usage: Usage) -> bytes:
        """The chunk after all choices, with the usage of all."""
        return f'{self._head},"choices":[]{_usage_end(usage)}'.encode("ascii")


def error_event(error: OrcaError, path: str = "") -> bytes:
    """The error that ended a stream early, in the form of the path's protocol.

    Clients raise it and expect no event after it. Protocols with names for events call it `error`.
    """
    trouble = trouble_of(error)
    body, name = body_at(path, trouble), ""
    if path == RESPONSES:
        body = {"type": "error", "code": trouble.code, "message": trouble.message, "param": trouble.param}
    if "type" in body:
        name = "event: error\n"
    return f"{name}data: {as_json(body)}\n\n".encode("ascii")


def _usage_end(usage: Usage) -> str:
    return f',"usage":{usage.model_dump_json(exclude_none=True)}}}\n\n'
