"""Turns kept items into the messages that the chat template renders."""

from collections.abc import Sequence
from typing import Any

from orca_jax.errors import InvalidRequest
from server.http.fields.conversation import CalledFunction, ChatMessage, ContentPart, ToolCall
from server.http.responses.items import Item
from server.http.responses.tools import CUSTOM_INPUT, joined_name


def messages_of(instructions: str | None, items: Sequence[Item], n_earlier: int) -> list[ChatMessage]:
    """The messages: `instructions` as a system message, then the items.

    The first `n_earlier` items are those of `previous_response_id`. What the model said in one turn, its
    reasoning, text and calls, is one message. Raises InvalidRequest, which names the item.
    """
    messages = list[ChatMessage]()
    if instructions is not None:
        messages.append(_message("system", instructions))
    calls = set[str]()
    for index, item in enumerate(items, -n_earlier):
        param = "previous_response_id" if index < 0 else f"input.{index}"
        match item["type"]:
            case "message" if item["role"] == "assistant":
                content = _content(item)
                last = _open_turn(messages)
                if last.content is None and not last.tool_calls:
                    last.content = content
                else:
                    messages.append(_message("assistant", content))
            case "message":
                messages.append(_message(item["role"], _content(item)))
            case "reasoning":
                texts = [part["text"] for part in item["content"]]
                last = _open_turn(messages, new=True)
                last.reasoning_content = "".join(texts) or None
            case "function_call" | "custom_tool_call":
                calls.add(item["call_id"])
                last = _open_turn(messages)
                last.tool_calls = [*(last.tool_calls or ()), _call(item)]
            case _:
                if item["call_id"] not in calls:
                    message = (
                        f"{param}.call_id is {item['call_id'][:80]!r}; no function_call before it has that id"
                    )
                    raise InvalidRequest(message, param=f"{param}.call_id")
                messages.append(_message("tool", item["output"], tool_call_id=item["call_id"]))
    return messages


def _message(role: str, content: Any, **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **fields)  # pyright: ignore[reportArgumentType]


def _open_turn(messages: list[ChatMessage], *, new: bool = False) -> ChatMessage:
    """The model's message that the next item belongs to: the last one, or a new one."""
    if new or not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant"))
    return messages[-1]


def _content(item: Item) -> Any:
    texts = [part["text"] for part in item["content"]]
    if len(texts) == 1:
        return texts[0]
    return [ContentPart(type="text", text=text) for text in texts]


def _call(item: Item) -> ToolCall:
    custom = item["type"] == "custom_tool_call"
    arguments = {CUSTOM_INPUT: item["input"]} if custom else item["arguments"]
    function = CalledFunction(name=joined_name(item.get("namespace"), item["name"]), arguments=arguments)
    return ToolCall(id=item["call_id"], function=function)
