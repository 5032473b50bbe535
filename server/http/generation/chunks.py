"""Writes the replies of chat and completions: whole messages, and the chunks of a stream as bytes.

The constant parts of chunks are encoded once per response. For each piece only its text is, and
log-probabilities if requested.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from orca_jax.errors import OrcaError
from orca_jax.request.request import FinishReason
from orca_jax.service.output import Piece
from server.gateway.reply.events import CallArguments, CallBegin, Reasoning, ReplyEvent, Text, whole_reply
from server.gateway.side_threads import run_for_response
from server.http.bodies.errors import error_event
from server.http.bodies.json_text import as_json
from server.http.fields.generation import StreamOptions, Usage
from server.http.fields.logprobs import n_characters
from server.http.generation.choices import Choices, CompleteChoice
from server.http.generation.reply_stream import ReplyWriter

_DIGITS = 6  # roughly, of a token id with its comma
DONE = b"data: [DONE]\n\n"
TOOL_CALLS = "tool_calls"  # the finish reason of a reply with calls

# Everything is ASCII, so that no client mistakes a Unicode character for a line break.


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """A route's form of a choice: `content` writes a whole one; the other fields describe its chunks.

    `object` and `chunk_object` name a response and a chunk. In a chunk, `before` (`first` in the first chunk)
    and `after` enclose the text. `prompt_by_choice` says where a prompt's tokens are returned: in each
    choice, or once next to the choices.
    """

    object: str
    content: Callable[[CompleteChoice], dict[str, Any]]
    chunk_object: str
    first: str
    before: str
    after: str
    prompt_by_choice: bool


class PieceExtras(NamedTuple):
    """The optional parts of a piece's chunks, as JSON.

    A choice's first piece may have the prompt's token ids, its last the routed experts.
    """

    logprobs: str | None = None
    token_ids: str | None = None
    prompt_ids: str | None = None
    routed: str | None = None

    @property
    def need_chunk(self) -> bool:
        """Whether a piece without text needs a chunk for them."""
        return self.logprobs is not None or self.token_ids is not None


NO_EXTRAS = PieceExtras()


class ChunkWriter(ReplyWriter):
    """Writes the chunks of one response.

    `head` has the fields that all chunks share. With `include_usage` every chunk has a `usage`, which is null
    in all but the last. With `versions` a choice's last chunk has the version of the weights. `has_text` is
    False for a model without a tokenizer, each of whose pieces gets a chunk although its text is empty.
    """

    ping = b""

    def __init__(
        self,
        choices: Choices,
        form: ReplyForm,
        head: Mapping[str, object],
        options: StreamOptions,
        *,
        has_text: bool,
        versions: bool,
    ) -> None:
        self.choices = choices
        self._is_plain = choices.extras is None and not choices.tally.readers  # only text
        self._final_usage = bool(options.include_usage)
        self._running_usage = bool(options.continuous_usage_stats)
        self._has_text = has_text
        self._begun = set[int]()  # choices that have sent their prompt's token ids
        fields = as_json({**head, "object": form.chunk_object})
        self._head = "data: " + fields.removesuffix("}")
        starts = [f'{self._head},"choices":[{{"index":{i},' for i in range(len(choices))]
        self._before = [start + form.first for start in starts]
        self._before_later = [start + form.before for start in starts]
        self._starts = [f'{start}"delta":' for start in starts]
        self._n_deltas = [0] * len(choices)
        reasons = [None, FinishReason.STOP, FinishReason.LENGTH, TOOL_CALLS]
        self._reason = {reason: f',"finish_reason":{as_json(reason)}}}]' for reason in reasons}
        self._logprobs = f'{form.after},"logprobs":'
        self._after = {reason: f"{self._logprobs}null{end}" for reason, end in self._reason.items()}
        self._versions = versions
        self._prompt_by_choice = form.prompt_by_choice
        self._no_usage = ',"usage":null}\n\n' if self._final_usage else "}\n\n"

    async def begin(self) -> bytes:
        return b""

    async def take(self, index: int, piece: Piece) -> bytes:
        return self._chunk(index, piece) if self._is_plain else await self._rich_chunk(index, piece)

    async def end(self) -> bytes:
        if not self._final_usage:
            return DONE
        usage = f'{self._head},"choices":[]{_usage_end(self.choices.tally.usage())}'
        return usage.encode("ascii") + DONE

    def fail(self, error: OrcaError) -> bytes:
        return error_event(error)

    async def _rich_chunk(self, index: int, piece: Piece) -> bytes:
        """The chunks for a piece with the request's extras, or with a chat's reasoning and calls."""
        events = await self.choices.events(index, piece)
        piece, tokens = await self.choices.take(index, piece)
        logprobs = routed = token_ids = prompt_ids = None
        if tokens:
            n = n_characters(tokens)
            logprobs = await run_for_response(n, lambda: as_json(self.choices.logprobs(tokens), n))
        if piece.finish_reason is not None and (n := self.choices.routed_size(index)):
            routed = await run_for_response(n, lambda: as_json(self.choices.routed_experts(index), n))
        if self.choices.returns_token_ids:
            token_ids = as_json(piece.token_ids)
            if index not in self._begun:
                self._begun.add(index)
                ids = [*self.choices.prompt_ids(index)]
                n = _DIGITS * len(ids)
                prompt_ids = await run_for_response(n, lambda: as_json(ids, n))
        extras = PieceExtras(logprobs, token_ids, prompt_ids, routed)
        if self.choices.tally.readers:
            return self._deltas(index, piece, deltas_of(events), extras)
        return self._chunk(index, piece, extras)

    def _chunk(self, index: int, piece: Piece, extras: PieceExtras = NO_EXTRAS) -> bytes:
        """The chunk for a piece; empty if there is nothing to show yet, as in the middle of a character."""
        self.choices.tally.take(index, piece)
        if not piece.text and piece.finish_reason is None and self._has_text and not extras.need_chunk:
            return b""
        before = self._before[index]
        self._before[index] = self._before_later[index]
        if extras is NO_EXTRAS and (piece.finish_reason is None or not self._versions):
            after = self._after[piece.finish_reason]
        else:
            fields = self._first_fields(extras)
            if piece.finish_reason is not None:
                fields += self._last_fields(piece.weights_version, extras)
            end = self._reason[piece.finish_reason].removesuffix("}]")
            after = f"{self._logprobs}{extras.logprobs or 'null'}{end}{fields}}}]{self._around(extras)}"
        return f"{before}{as_json(piece.text)}{after}{self._usage_so_far()}".encode("ascii")

    def _deltas(
        self, index: int, piece: Piece, deltas: Sequence[Mapping[str, object]], extras: PieceExtras
    ) -> bytes:
        """The chunks for a piece of a chat whose replies are more than text, one for each delta.

        A choice's first chunk has its role, a piece's first chunk its `extras`. The end of a choice has a
        separate chunk, with the routed experts.
        """
        tally = self.choices.tally
        tally.take(index, piece)
        shown = [*deltas] if deltas or not extras.need_chunk else [{}]
        if shown and not self._n_deltas[index]:
            shown[0] = {"role": "assistant", "content": None, **shown[0]}
        self._n_deltas[index] += len(shown)
        usage_end = self._usage_so_far()
        chunks = list[str]()
        now = extras
        for delta in shown:
            after = f"{self._reason[None].removesuffix('}]')}{self._first_fields(now)}}}]{self._around(now)}"
            chunks.append(self._delta(index, delta, now.logprobs, f"{after}{usage_end}"))
            now = NO_EXTRAS
        if piece.finish_reason is not None:
            fields = self._last_fields(piece.weights_version, extras)
            after = f"{self._reason[tally.finish_reason(index)].removesuffix('}]')}{fields}}}]"
            chunks.append(self._delta(index, {}, None, f"{after}{usage_end}"))
        return "".join(chunks).encode("ascii")

    def _first_fields(self, extras: PieceExtras) -> str:
        """The fields of the choice that come with the first chunk of a piece."""
        fields = ""
        if extras.prompt_ids is not None and self._prompt_by_choice:
            fields = f',"prompt_token_ids":{extras.prompt_ids}'
        if extras.token_ids is not None:
            fields += f',"token_ids":{extras.token_ids}'
        return fields

    def _last_fields(self, weights_version: int | None, extras: PieceExtras) -> str:
        """The fields of the choice that come with its last chunk."""
        fields = f',"weights_version":{weights_version}' if self._versions else ""
        return fields if extras.routed is None else f'{fields},"routed_experts":{extras.routed}'

    def _around(self, extras: PieceExtras) -> str:
        """The fields next to the choices."""
        if extras.prompt_ids is None or self._prompt_by_choice:
            return ""
        return f',"prompt_token_ids":{extras.prompt_ids}'

    def _delta(self, index: int, delta: Mapping[str, object], logprobs: str | None, end: str) -> str:
        return f'{self._starts[index]}{as_json(delta)},"logprobs":{logprobs or "null"}{end}'

    def _usage_so_far(self) -> str:
        return _usage_end(self.choices.tally.usage()) if self._running_usage else self._no_usage


def _usage_end(usage: Usage) -> str:
    return f',"usage":{usage.model_dump_json(exclude_none=True)}}}\n\n'


def _message_of(choice: CompleteChoice) -> dict[str, Any]:
    """The reply in the form of AnswerMessage."""
    reply = whole_reply([Text(choice.text)] if choice.events is None else choice.events)
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return {"message": message}


def deltas_of(events: Sequence[ReplyEvent]) -> list[dict[str, Any]]:
    """The `delta` of each event."""
    deltas = list[dict[str, Any]]()
    for event in events:
        match event:
            case Text(text):
                delta: dict[str, Any] = {"content": text}
            case Reasoning(text):
                delta = {"reasoning_content": text}
            case CallBegin(index, id, name):
                function = {"name": name, "arguments": ""}
                delta = {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
            case CallArguments(index, text):
                delta = {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case _:
                continue
        deltas.append(delta)
    return deltas


TEXT_FORM = ReplyForm(
    object="text_completion",
    content=lambda choice: {"text": choice.text},
    chunk_object="text_completion",
    first='"text":',
    before='"text":',
    after="",
    prompt_by_choice=True,
)
CHAT_FORM = ReplyForm(
    object="chat.completion",
    content=_message_of,
    chunk_object="chat.completion.chunk",
    first='"delta":{"role":"assistant","content":',
    before='"delta":{"content":',
    after="}",
    prompt_by_choice=False,
)
