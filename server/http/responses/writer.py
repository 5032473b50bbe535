"""Turns the parts of a reply into the events of a response, and collects the whole response."""

import time
from collections.abc import Awaitable, Callable, Sequence
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
from server.http.fields.logprobs import PlacedToken
from server.http.generation.answer import new_id
from server.http.generation.event_writer import Event, ReplyEnd, text_size
from server.http.responses.items import Item, custom_input
from server.http.responses.tools import ToolName

_TokenLogprobs = list[dict[str, Any]]
# Stores a whole response of about as many characters. False if it is not stored.
Keep = Callable[[dict[str, Any], int], Awaitable[bool]]


class ResponseWriter:
    """Writes one response. `head` has all its fields but the output, of about `n_head` characters.

    `called` finds the client's tool for the name that the model calls. An output item is open from its first
    event to its last. `whole` is the response so far.
    """

    ping: Event | None = None

    def __init__(
        self,
        head: dict[str, Any],
        n_head: int,
        write_logprobs: Callable[[Sequence[PlacedToken]], _TokenLogprobs],
        keep: Keep,
        called: Callable[[str], ToolName],
    ) -> None:
        self.whole: dict[str, Any] = {**head, "status": "in_progress", "output": []}
        self.n_characters = n_head
        self._write_logprobs = write_logprobs
        self._keep = keep
        self._called = called
        self._number = 0
        self._item: Item | None = None  # the open one
        self._texts = list[str]()  # of the open item
        self._tokens: _TokenLogprobs = []
        self._n_item = 0  # characters of the open item

    @property
    def output(self) -> list[Item]:
        return self.whole["output"]

    def begin(self) -> list[Event]:
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def take(self, event: ReplyEvent, tokens: Sequence[PlacedToken]) -> list[Event]:
        match event:
            case Text(text):
                return self._message(text, tokens)
            case Reasoning(text):
                return self._reasoning(text)
            case CallBegin(_, call_id, name):
                return [*self._close(), self._call(call_id, self._called(name))]
            case CallArguments(_, text):
                assert self._item is not None
                if self._item["type"] == "custom_tool_call":
                    self._texts.append(text)  # the input is not known until its JSON is complete
                    return []
                return [self._delta("function_call_arguments", text)]
            case CallEnd():
                return self._close()
            case CallCut():
                return self._close("incomplete")

    async def end(self, end: ReplyEnd) -> list[Event]:
        """The end of the last item, and the whole response, after it has been stored."""
        status = "incomplete" if end.reason is FinishReason.LENGTH else "completed"
        events = list[Event]()
        if self._item is None and not self.output:
            events += self._message("", ())
        events += self._close(status)
        if status == "incomplete":
            self.whole["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.whole["completed_at"] = int(time.time())
        self.whole["status"] = status
        self.whole["usage"] = usage_of(end)
        if "weights_version" in self.whole:
            self.whole["weights_version"] = end.weights_version
        self.whole["store"] = await self._keep(self.whole, self.n_characters)
        return [*events, self._lifecycle(status)]

    def fail(self, error: OrcaError) -> list[Event]:
        events = self._close("incomplete")
        self.whole["status"] = "failed"
        self.whole["error"] = {"code": "server_error", "message": str(error)}
        return [*events, self._lifecycle("failed")]

    def _message(self, text: str, tokens: Sequence[PlacedToken]) -> list[Event]:
        events = list[Event]()
        if not self._is_open("message"):
            events += self._close()
            message = {"type": "message", "role": "assistant", "content": []}
            events.append(self._open(message, "msg"))
            events.append(self._part("added", {**_EMPTY_TEXT, "logprobs": []}))
        if text or tokens:
            logprobs = self._write_logprobs(tokens) if tokens else []
            self._tokens += logprobs
            size = text_size(text, tokens)
            events.append(self._delta("output_text", text, size, content_index=0, logprobs=logprobs))
        return events

    def _reasoning(self, text: str) -> list[Event]:
        events = list[Event]()
        if not self._is_open("reasoning"):
            events += self._close()
            events.append(self._open({"type": "reasoning", "summary": [], "content": []}, "rs"))
            events.append(self._part("added", {"type": "reasoning_text", "text": ""}))
        return [*events, self._delta("reasoning_text", text, content_index=0)]

    def _call(self, call_id: str, tool: ToolName) -> Event:
        namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
        call = {"call_id": call_id, "name": tool.name, **namespace}
        if tool.is_custom:
            return self._open({"type": "custom_tool_call", **call, "input": ""}, "ctc")
        return self._open({"type": "function_call", **call, "arguments": ""}, "fc")

    def _custom_input(self, item: Item, arguments: str) -> list[Event]:
        """The events of a custom tool's whole input, which the model wrote as a function's argument."""
        text = custom_input(arguments)
        item["input"] = text
        self._texts = []
        return [
            self._delta("custom_tool_call_input", text),
            self._of_item("custom_tool_call_input.done", len(text), input=text),
        ]

    def _is_open(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def _open(self, item: Item, prefix: str) -> Event:
        self._item = {"id": new_id(prefix), **item, "status": "in_progress"}
        self._texts, self._tokens, self._n_item = [], [], 0
        return self._event("output_item.added", 0, output_index=len(self.output), item={**self._item})

    def _close(self, status: str = "completed") -> list[Event]:
        """The events that end the open item, if there is one."""
        item = self._item
        if item is None:
            return []
        text, n = "".join(self._texts), self._n_item
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._of_item("function_call_arguments.done", n, arguments=text)]
        elif item["type"] == "custom_tool_call":
            events = self._custom_input(item, text)
        elif item["type"] == "reasoning":
            part = {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            events = [self._of_item("reasoning_text.done", n, content_index=0, text=text)]
            events.append(self._part("done", part))
        else:
            part = {**_EMPTY_TEXT, "text": text, "logprobs": self._tokens}
            item["content"] = [part]
            fields = {"content_index": 0, "text": text, "logprobs": self._tokens}
            events = [self._of_item("output_text.done", n, **fields), self._part("done", part)]
        item["status"] = status
        events.append(self._event("output_item.done", n, output_index=len(self.output), item=item))
        self.output.append(item)
        self.n_characters += n
        self._item = None
        return events

    def _delta(self, kind: str, text: str, size: int | None = None, **fields: Any) -> Event:
        self._texts.append(text)
        n = len(text) if size is None else size
        self._n_item += n
        return self._of_item(f"{kind}.delta", n, delta=text, **fields)

    def _part(self, what: str, part: dict[str, Any]) -> Event:
        return self._of_item(f"content_part.{what}", self._n_item, content_index=0, part=part)

    def _of_item(self, name: str, n: int, **fields: Any) -> Event:
        assert self._item is not None
        return self._event(name, n, item_id=self._item["id"], output_index=len(self.output), **fields)

    def _lifecycle(self, name: str) -> Event:
        response = {**self.whole, "output": [*self.output]}
        return self._event(name, self.n_characters, response=response)

    def _event(self, name: str, n: int, **fields: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return Event({"type": f"response.{name}", "sequence_number": number, **fields}, n)


_EMPTY_TEXT: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}


def usage_of(end: ReplyEnd) -> dict[str, Any]:
    """Token counts in the form of the Responses API."""
    return {
        "input_tokens": end.n_input,
        "input_tokens_details": {"cached_tokens": end.n_cached, "cache_write_tokens": 0},
        "output_tokens": end.n_output,
        "output_tokens_details": {"reasoning_tokens": end.n_reasoning},
        "total_tokens": end.n_input + end.n_output,
    }
