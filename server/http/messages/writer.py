"""Turns the parts of a reply into the events of a message, and collects the whole message."""

import json
from collections.abc import Sequence
from typing import Any

from orca_jax.errors import OrcaError
from orca_jax.request.request import FinishReason
from server.gateway.reply.events import (
    CallArguments,
    CallBegin,
    CallCut,
    CallEnd,
    Reasoning,
    ReplyEvent,
    Text,
)
from server.http.bodies.errors import anthropic_body, trouble_of
from server.http.fields.logprobs import PlacedToken
from server.http.generation.event_writer import Event, ReplyEnd

_Block = dict[str, Any]


class MessageWriter:
    """Writes one message, for a request of at most `max_tokens` with a prompt of `n_input` tokens.

    A content block is open from its first event to its last. `whole` is the message so far.
    """

    ping: Event | None = Event({"type": "ping"})

    def __init__(self, message_id: str, model: str, *, n_input: int, max_tokens: int) -> None:
        self.whole: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(n_input, 0, 0),
        }
        self.n_characters = 0
        self._max_tokens = max_tokens
        self._block: _Block | None = None  # the open one
        self._texts = list[str]()  # of the open block
        self._index = -1
        self._n_calls = 0

    @property
    def content(self) -> list[_Block]:
        return self.whole["content"]

    def begin(self) -> list[Event]:
        return [Event({"type": "message_start", "message": {**self.whole, "content": []}})]

    def take(self, event: ReplyEvent, tokens: Sequence[PlacedToken]) -> list[Event]:
        """The events for more of the reply. The protocol has no log-probabilities."""
        if isinstance(event, Text | Reasoning) and not event.text:
            return []
        match event:
            case Text(text):
                begin = self._in({"type": "text", "text": ""})
                return [*begin, self._delta({"type": "text_delta", "text": text}, text)]
            case Reasoning(text):
                begin = self._in({"type": "thinking", "thinking": "", "signature": ""})
                return [*begin, self._delta({"type": "thinking_delta", "thinking": text}, text)]
            case CallBegin(_, call_id, name):
                call = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return [*self._close(), *self._in(call)]
            case CallArguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text}, text)]
            case CallEnd():
                self._n_calls += 1
                return self._close()
            case CallCut(_, text):
                return self._cut(text)

    async def end(self, end: ReplyEnd) -> list[Event]:
        events = self._close()
        reason, text = self._stop(end)
        usage = _usage(end.n_input, end.n_cached, end.n_output)
        self.whole |= {"stop_reason": reason, "stop_sequence": text, "usage": usage}
        delta = {"stop_reason": reason, "stop_sequence": text}
        return [
            *events,
            Event({"type": "message_delta", "delta": delta, "usage": usage}),
            Event({"type": "message_stop"}),
        ]

    def fail(self, error: OrcaError) -> list[Event]:
        return [Event(anthropic_body(trouble_of(error)))]

    def _stop(self, end: ReplyEnd) -> tuple[str, str | None]:
        """Why the message ended, and the stop sequence that ended it."""
        if end.reason is FinishReason.LENGTH:
            whole = end.n_output >= self._max_tokens
            return "max_tokens" if whole else "model_context_window_exceeded", None
        if self._n_calls:
            return "tool_use", None
        return "end_turn" if end.stop_string is None else "stop_sequence", end.stop_string

    def _in(self, block: _Block) -> list[Event]:
        """The events that open this block, unless a block of the same type is open."""
        if self._block is not None and self._block["type"] == block["type"]:
            return []
        events = self._close()
        self._block, self._texts = block, []
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": {**block}}
        return [*events, Event(start)]

    def _delta(self, delta: dict[str, Any], text: str) -> Event:
        self._texts.append(text)
        self.n_characters += len(text)
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return Event(event, len(text))

    def _close(self) -> list[Event]:
        """The events that end the open block, if there is one."""
        block, events = self._block, list[Event]()
        if block is None:
            return []
        text = "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
        elif block["type"] == "thinking":
            block["thinking"] = text
            events.append(self._delta({"type": "signature_delta", "signature": ""}, ""))
        else:
            block["text"] = text
        return [*events, self._leave(block)]

    def _cut(self, text: str) -> list[Event]:
        """End an invalid call: a stream has begun it, and the whole message has its text as content."""
        last = self.content[-1] if self.content else None
        if last is not None and last["type"] == "text":
            last["text"] += text
            return [self._leave(None)]
        return [self._leave({"type": "text", "text": text})]

    def _leave(self, block: _Block | None) -> Event:
        if block is not None:
            self.content.append(block)
        self._block = None
        return Event({"type": "content_block_stop", "index": self._index})


def _usage(n_input: int, n_cached: int, n_output: int) -> dict[str, int]:
    """Token counts. Cached input tokens are counted separately."""
    return {
        "input_tokens": n_input - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_output,
    }
