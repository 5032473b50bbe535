"""Writes the chunks of a stream as bytes. The constant parts are encoded once per response; for each piece
only its text and any log-probabilities are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orca_jax.errors import OrcaError
from orca_jax.request.request import FinishReason
from orca_jax.service.output import Piece
from server.http.bodies.errors import body_at, trouble_of
from server.http.bodies.json_text import as_json
from server.http.fields.generation import Usage

DONE = b"data: [DONE]\n\n"
RESPONSES = "/v1/responses"
TOOL_CALLS = "tool_calls"  # the finish reason of a reply with calls

# Everything is ASCII, so that no client mistakes a Unicode character for a line break.


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """The JSON around a choice's text in a chunk: `before` (`first` in the first chunk) and `after`.

    `prompt_ids_by_choice` says where a prompt's token ids are returned: in each choice, or once beside them.
    """

    object: str
    first: str
    before: str
    after: str
    prompt_ids_by_choice: bool


TEXT_CHUNK = ChunkShape("text_completion", '"text":', '"text":', "", prompt_ids_by_choice=True)
CHAT_CHUNK = ChunkShape(
    "chat.completion.chunk",
    '"delta":{"role":"assistant","content":',
    '"delta":{"content":',
    "}",
    prompt_ids_by_choice=False,
)


class PieceExtras(NamedTuple):
    """Make the other parts of a piece's chunks, as JSON: log-probabilities, the tokens' ids, those of the
    prompt with a choice's first piece, and routed experts with its last.
    """

    logprobs: str | None = None
    token_ids: str | None = None
    prompt_ids: str | None = None
    routed: str | None = None

    @property
    def need_chunk(self) -> bool:
        """Whether a piece without text has a chunk for these."""
        return self.logprobs is not None or self.token_ids is not None


NO_EXTRAS = PieceExtras()


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
        self._prompt_ids_by_choice = shape.prompt_ids_by_choice
        self._no_usage = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def chunk(
        self, index: int, piece: Piece, usage: Usage | None = None, extras: PieceExtras = NO_EXTRAS
    ) -> bytes:
        """The chunk for a piece of choice `index`."""
        before = self._before[index]
        self._before[index] = self._before_later[index]
        if extras is NO_EXTRAS and (piece.finish_reason is None or not self._versions):
            after = self._after[piece.finish_reason]
        else:
            fields = self._first_fields(extras)
            if piece.finish_reason is not None:
                fields += self._last_fields(piece.weights_version, extras)
            end = self._reason[piece.finish_reason].removesuffix("}]")
            after = f"{self._logprobs}{extras.logprobs or 'null'}{end}{fields}}}]{self._beside(extras)}"
        end = self._no_usage if usage is None else _usage_end(usage)
        return f"{before}{as_json(piece.text)}{after}{end}".encode("ascii")

    def deltas(
        self,
        index: int,
        deltas: Sequence[Mapping[str, object]],
        end: ChoiceEnd | None,
        usage: Usage | None = None,
        extras: PieceExtras = NO_EXTRAS,
    ) -> bytes:
        """A chunk for each of a chat choice's deltas, the first with its role and the first of these with
        `extras`, and one for its `end`, with the routed experts.
        """
        shown = [*deltas] if deltas or not extras.need_chunk else [{}]
        if shown and not self._n_deltas[index]:
            shown[0] = {"role": "assistant", "content": None, **shown[0]}
        self._n_deltas[index] += len(shown)
        usage_end = self._no_usage if usage is None else _usage_end(usage)
        chunks = list[str]()
        now = extras
        for delta in shown:
            after = f"{self._reason[None].removesuffix('}]')}{self._first_fields(now)}}}]{self._beside(now)}"
            chunks.append(self._delta(index, delta, now.logprobs, f"{after}{usage_end}"))
            now = NO_EXTRAS
        if end is not None:
            fields = self._last_fields(end.weights_version, extras)
            after = f"{self._reason[end.reason].removesuffix('}]')}{fields}}}]"
            chunks.append(self._delta(index, {}, None, f"{after}{usage_end}"))
        return "".join(chunks).encode("ascii")

    def _first_fields(self, extras: PieceExtras) -> str:
        """The fields of the choice that come with the first chunk of a piece."""
        fields = ""
        if extras.prompt_ids is not None and self._prompt_ids_by_choice:
            fields = f',"prompt_token_ids":{extras.prompt_ids}'
        if extras.token_ids is not None:
            fields += f',"token_ids":{extras.token_ids}'
        return fields

    def _last_fields(self, weights_version: int | None, extras: PieceExtras) -> str:
        """The fields of the choice that come with its last chunk."""
        fields = f',"weights_version":{weights_version}' if self._versions else ""
        return fields if extras.routed is None else f'{fields},"routed_experts":{extras.routed}'

    def _beside(self, extras: PieceExtras) -> str:
        """The fields beside the choices."""
        if extras.prompt_ids is None or self._prompt_ids_by_choice:
            return ""
        return f',"prompt_token_ids":{extras.prompt_ids}'

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
