"""A conversation with a model: its messages, its settings, and a reply that is shown as it comes."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from orca_jax.errors import PromptTooLong
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from server.commands.notes import Notes
from server.commands.replies import Prepared, Replies, printable
from server.gateway.reply.events import Reasoning, ReplyEvent, Text, whole_reply
from server.settings.sampling_flags import chat_params

if TYPE_CHECKING:
    from orca_jax import LLM


@dataclass(frozen=True, slots=True)
class Statistics:
    """The tokens and times of a reply."""

    n_input: int
    n_cached: int
    n_output: int
    first_seconds: float
    rest_seconds: float

    def __str__(self) -> str:
        rate = ""
        if self.n_output > 1:
            rate = f", then {(self.n_output - 1) / max(self.rest_seconds, 1e-9):,.0f} tokens/s"
        prompt = f"{self.n_input:,} tokens ({self.n_cached:,} of them cached)"
        return f"{prompt} + {self.n_output:,} tokens, the first after {self.first_seconds:.1f} s{rate}"


class Chat:
    """A conversation and its settings. `messages` are without the system prompt."""

    def __init__(
        self, llm: "LLM", replies: Replies, args: argparse.Namespace, notes: Notes, *, is_terminal: bool
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.system: str | None = args.system
        self.flags = args
        self.statistics: Statistics | None = None
        self.note = notes
        self._llm, self._replies = llm, replies
        self.is_terminal = is_terminal
        self._screen = Console(highlight=False)

    def all_messages(self) -> list[dict[str, Any]]:
        """All messages, with the system prompt first."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def sampling(self) -> SamplingParams:
        """The parameters of the next reply; `max_tokens` is limited by the room for it."""
        return chat_params(self.flags, self._llm.generation_defaults.sampling)

    def say(self, text: str) -> None:
        """Send a message and show the reply. Without a reply the message is taken back."""
        self.messages.append({"role": "user", "content": text})
        replied = False
        try:
            replied = self.reply()
        finally:
            if not replied:
                self.messages.pop()
        if not replied:
            self.note("stopped; the message is taken back")

    def reply(self) -> bool:
        """Reply to the last message; False if the user stops it before the first token.

        Raises a leaf of InvalidRequest, OutputFailed, or EngineError.
        """
        try:
            prepared = self._replies.prepare(self.all_messages(), self._for_room)
        except PromptTooLong as error:
            error.args = (f"{error}; /clear begins a new conversation, /undo drops the last turn",)
            raise
        reply, reason = self._generate(prepared)
        if reply is None:
            return False
        self.messages.append(reply)
        if reason is FinishReason.LENGTH:
            self.note(self._why_cut(prepared))
        elif reason is FinishReason.CANCELLED:
            self.note("stopped")
        return True

    def _for_room(self, room: int) -> SamplingParams:
        """The parameters for a reply of at most `room` tokens."""
        sampling = self.sampling()
        wanted = getattr(self.flags, "max_tokens", None) or self._llm.generation_defaults.max_tokens or room
        # Without room the prompt is rejected, which these parameters must not forestall.
        return replace(sampling, max_tokens=max(1, min(wanted, room)))

    def _generate(self, prepared: Prepared) -> tuple[dict[str, Any] | None, FinishReason | None]:
        """Show a reply as it comes; return its message, or None if it was stopped while empty."""
        reader = prepared.reader()
        events: list[ReplyEvent] = []
        n_output = 0
        reason: FinishReason | None = None
        begin = time.monotonic()
        (generation,) = self._replies.start(prepared)
        first = last = begin
        with generation:
            try:
                with self.note.console.status("Running prefill"):
                    piece = generation.next_piece()
                first = time.monotonic()
                while piece is not None:
                    n_output += len(piece.token_ids)
                    reason = piece.finish_reason
                    new = reader.take(piece)
                    events += new
                    self._show(new)
                    piece = generation.next_piece()
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                reason = FinishReason.CANCELLED
            last = time.monotonic()
            n_cached = generation.n_cached
        print(flush=True)
        self.statistics = Statistics(
            len(prepared.prompt.token_ids), n_cached, n_output, first - begin, last - first
        )
        whole = whole_reply(events)
        if reason is FinishReason.CANCELLED and not (whole.content or whole.reasoning):
            return None, reason
        message: dict[str, Any] = {"role": "assistant", "content": whole.content or ""}
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        return message, reason

    def _show(self, events: Sequence[ReplyEvent]) -> None:
        """Write text, and at a terminal reasoning, dim."""
        for event in events:
            match event:
                case Text(text):
                    print(printable(text) if self._screen.is_terminal else text, end="", flush=True)
                case Reasoning(text) if self._screen.is_terminal:
                    self._screen.out(printable(text), style="dim", end="", highlight=False)
                case _:
                    pass

    def _why_cut(self, prepared: Prepared) -> str:
        most = prepared.rules.sampling.max_tokens
        n_input = len(prepared.prompt.token_ids)
        if most == self._llm.service.most_output(n_input):
            return (
                f"cut: the conversation fills the model's {n_input + most:,} tokens; /clear begins a new "
                "one, /undo drops the last turn"
            )
        return f"cut after {most:,} tokens; /set max_tokens N allows more, and /retry tries again"
