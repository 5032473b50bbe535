"""Decides how a request's replies are generated and parsed, from its tools, the model and the prompt."""

import json
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orca_jax.errors import NotSupported
from orca_jax.grammar.source import check_schemas
from orca_jax.request.chat.tools import NO_TOOLS, ToolWish
from orca_jax.request.output_form import PLAIN_TEXT, OutputForm
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.output import Piece
from orca_jax.service.prepared_params import OutputRules
from server.gateway.reply.call_grammar import ReplyGrammar, Special, Thinking
from server.gateway.reply.events import ReplyEvent
from server.gateway.reply.reasoning_format import ReasoningFormat, plain_text
from server.gateway.reply.reply import Read, ReplyParser
from server.gateway.served_model import ServedModel
from server.gateway.tool_formats.gpt_oss import GPT_OSS, GPT_OSS_REASONING, MARKERS, harmony
from server.gateway.tool_formats.tool_format import ToolFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPlan:
    """The rules for generating and parsing the outputs of one request.

    `form` constrains the outputs; `loose_form` replaces it if no grammar can be made from the tools' schemas,
    and is None if the schemas must be followed. `read` parses an output, which may call the functions
    `offered`.
    """

    form: OutputForm = PLAIN_TEXT
    loose_form: OutputForm | None = None
    read: Read = plain_text
    offered: frozenset[str] = frozenset()
    has_reasoning: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the replies are nothing but text."""
        return self.read is plain_text


PLAIN_REPLY = ReplyPlan()


def plan_reply(
    model: ServedModel, prompt: str, sampling: SamplingParams, wish: ToolWish = NO_TOOLS
) -> ReplyPlan:
    """The plan for replies to `prompt`, a conversation as the chat template renders it.

    Raises a leaf of InvalidRequest that names `tools` or `tool_choice`. The cost grows with the tools'
    schemas.
    """
    tools, reasoning = model.tool_format, model.reasoning_format
    calls = tools if wish.tools else None
    if calls is None and wish.must_call:
        message = f"{model.name} has no known format of tool calls, so it cannot be made to call one; leave "
        message += "tool_choice out, or start the server with --tool-format"
        raise NotSupported(message, param="tool_choice")
    thinking = _thinking(reasoning, prompt)
    if thinking is Thinking.NONE:
        reasoning = None
    if calls is None and reasoning is None:
        return PLAIN_REPLY
    if calls is not None and sampling.use_beam_search:
        raise NotSupported("tools and use_beam_search are both given; give one of them", param="tools")
    special = _special(model, calls, reasoning)
    may_be_loose = not wish.must_call and any(not tool.strict for tool in wish.tools)
    forms = _Forms(special, calls, reasoning, thinking, sampling, wish)
    return ReplyPlan(
        form=forms.form([tool.schema for tool in wish.tools]),
        loose_form=forms.form([tool.loose_schema for tool in wish.tools]) if may_be_loose else None,
        read=_read(calls, reasoning, thinking),
        offered=frozenset() if calls is None else wish.names,
        has_reasoning=reasoning is not None,
    )


def _thinking(reasoning: ReasoningFormat | None, prompt: str) -> Thinking:
    if reasoning is None or reasoning.is_closed_by(prompt):
        return Thinking.NONE
    return Thinking.OPENED if reasoning.is_opened_by(prompt) else Thinking.MAYBE


def _special(
    model: ServedModel, calls: ToolFormat | None, reasoning: ReasoningFormat | None
) -> Mapping[str, int]:
    """The ids of those markers that are special tokens."""
    tokenizer = model.tokenizer
    assert tokenizer is not None, "a prompt has been encoded"
    markers = MARKERS if GPT_OSS_REASONING is reasoning else ()
    markers += () if calls is None else calls.markers
    markers += () if reasoning is None else reasoning.markers
    return {marker: i for marker in markers if (i := tokenizer.special_id(marker)) is not None}


def _read(calls: ToolFormat | None, reasoning: ReasoningFormat | None, thinking: Thinking) -> Read:
    if calls is GPT_OSS or reasoning is GPT_OSS_REASONING:
        return harmony(has_reasoning=reasoning is not None)
    read = plain_text if calls is None else calls.read
    if reasoning is None:
        return read
    return reasoning.reading(read, opened=thinking is Thinking.OPENED)


@dataclass(frozen=True, slots=True)
class _Forms:
    """Makes the output form of one request, from strict or loose schemas."""

    special: Mapping[str, int]
    calls: ToolFormat | None
    reasoning: ReasoningFormat | None
    thinking: Thinking
    sampling: SamplingParams
    wish: ToolWish

    def form(self, schemas: Sequence[Mapping[str, Any]]) -> OutputForm:
        """The form with calls whose arguments follow these schemas. Raises InvalidSamplingParameter."""
        texts = tuple(map(json.dumps, schemas)) if self.calls is not None else ()
        if texts:
            check_schemas("tools", *map(dict, schemas))
        return OutputForm(lark=self._lark(), schemas=texts, shown=frozenset(self.special))

    def _lark(self) -> str | None:
        grammar = ReplyGrammar(Special(self.special), self.reasoning, self.thinking)
        has_body = self.sampling.grammar is not None
        wish = self.wish
        if self.calls is GPT_OSS or self.reasoning is GPT_OSS_REASONING:
            if self.calls is None and not has_body:
                return None
            tools = [] if self.calls is None else wish.tools
            return grammar.for_messages(tools, must_call=wish.must_call, has_body=has_body)
        if self.calls is None:
            return grammar.for_body() if has_body else None
        return grammar.for_calls(
            self.calls, wish.tools, must_call=wish.must_call, parallel=wish.parallel, has_body=has_body
        )


class ReplyReader:
    """Parses one output, which `rules` constrain as `plan` says, and counts its reasoning tokens."""

    def __init__(self, plan: ReplyPlan, rules: OutputRules, *, continuing: bool) -> None:
        """With `continuing` the output follows other text, as in TextStream."""
        self._parser = ReplyParser(plan.read, plan.offered)
        self._rules = rules
        self._decoder = rules.text_decoder(continuing=continuing) if plan.has_reasoning else None
        self._begins = array("L")  # for each token, the number of characters before it

    def take(self, piece: Piece) -> list[ReplyEvent]:
        """The events that are certain with this piece of the output. The last piece has a finish reason."""
        if self._decoder is not None:
            for token_id in piece.token_ids:
                token = self._rules.token_text(token_id)
                self._begins.append(self._decoder.n if token is None else self._decoder.place(token))
        events = self._parser.feed(piece.text)
        return events if piece.finish_reason is None else events + self._parser.finish()

    @property
    def n_calls(self) -> int:
        return self._parser.n_calls

    @property
    def n_reasoning_tokens(self) -> int:
        """Tokens so far that are reasoning, or its markers."""
        n = 0
        for begin, end in self._parser.reasoning_spans:
            last = len(self._begins) if end is None else bisect_left(self._begins, end)
            n += last - bisect_left(self._begins, begin)
        return n
