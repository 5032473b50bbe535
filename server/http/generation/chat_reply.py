"""Writes a chat's reply in OpenAI's form: its content, its reasoning and its tool calls."""

from collections.abc import Sequence
from typing import Any

from server.gateway.reply.events import (
    CallArguments,
    CallBegin,
    Reasoning,
    ReplyEvent,
    Text,
    whole_reply,
)


def message_of(events: Sequence[ReplyEvent]) -> dict[str, Any]:
    """A whole reply in the form of AnswerMessage."""
    reply = whole_reply(events)
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


def deltas_of(events: Sequence[ReplyEvent]) -> list[dict[str, Any]]:
    """What these events add to a reply, each kind in a `delta` of its own."""
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
