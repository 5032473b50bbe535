"""The items of `input`: messages, tool calls and their outputs, and reasoning, as clients may send them.

`kept_items` converts them to the form that is stored, returned by GET input_items and read by the next
request. `messages_of` converts that form to the messages that the chat template renders.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from orca_jax.errors import InvalidRequest
from server.http.fields.conversation import CalledFunction, ChatMessage, ContentPart, ToolCall
from server.http.fields.strict import NotBuilt, Strict, null_is, text_or, type_of
from server.http.generation.answer import new_id
from server.http.responses.tools import CUSTOM_INPUT, joined_name

Item = dict[str, Any]  # an item in its stored form
_Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(Strict):
    """A part of a message's content, or of a tool's output."""

    place: ClassVar = "content parts of responses"

    type: Annotated[
        Literal["input_text", "output_text", "refusal", "input_image", "input_file", "input_audio"],
        NotBuilt("input_text", "output_text", why="the model reads text alone"),
    ]
    text: str | None = None

    refusal: Annotated[str | None, NotBuilt(why="the model reads text alone")] = None
    image_url: Annotated[str | None, NotBuilt(why="the model reads text alone")] = None
    detail: Annotated[str | None, NotBuilt(why="the model reads text alone")] = None
    file_id: Annotated[str | None, NotBuilt(why="the model reads text alone")] = None
    file_data: Annotated[str | None, NotBuilt(why="the model reads text alone")] = None
    file_url: Annotated[str | None, NotBuilt(why="the model reads text alone")] = None
    filename: Annotated[str | None, NotBuilt(why="the model reads text alone")] = None
    input_audio: Annotated[dict[str, Any] | None, NotBuilt(why="the model reads text alone")] = None


Content = Annotated[list[InputPart], text_or(list[InputPart])]


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part.text or "" for part in content]


class _InputItem(Strict):
    """An item, whose stored form has an id and a status."""

    place: ClassVar = "input items"

    id: str | None = None
    status: _Status | None = None

    def _kept(self, kind: str, id_prefix: str, **fields: Any) -> Item:
        status = self.status or "completed"
        return {"type": kind, "id": self.id or new_id(id_prefix), **fields, "status": status}


class MessageItem(_InputItem):
    """A message: a new one, or one of an earlier response's output."""

    type: Annotated[Literal["message"], null_is("message")] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    def kept(self) -> Item:
        """The stored form, with the content as parts."""
        part = {"type": "input_text"}
        if self.role == "assistant":
            part = {"type": "output_text", "annotations": []}
        content = [{**part, "text": text} for text in _texts(self.content)]
        return self._kept("message", "msg", role=self.role, content=content)


class _CallItem(_InputItem):
    """A call that the model made."""

    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    namespace: Annotated[str | None, Field(description="the namespace that the tool is in, if any")] = None

    def _kept_call(self, kind: str, id_prefix: str, **fields: str) -> Item:
        if self.namespace is not None:
            fields["namespace"] = self.namespace
        return self._kept(kind, id_prefix, call_id=self.call_id, name=self.name, **fields)


class CallItem(_CallItem):
    """A function call that the model made."""

    type: Literal["function_call"]
    arguments: Annotated[str, Field(description="the text of a JSON object")]

    def kept(self) -> Item:
        """The stored form."""
        return self._kept_call(self.type, "fc", arguments=self.arguments)


class CustomCallItem(_CallItem):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    input: str

    def kept(self) -> Item:
        """The stored form."""
        return self._kept_call(self.type, "ctc", input=self.input)


class CallOutputItem(_InputItem):
    """The return value of the client's function or custom tool."""

    place: ClassVar = "outputs among input items"

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Content

    def kept(self) -> Item:
        """The stored form, with the output as one text."""
        return self._kept(self.type, "fco", call_id=self.call_id, output="\n".join(_texts(self.output)))


class ReasoningPart(Strict):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(_InputItem):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None

    def kept(self) -> Item:
        """The stored form."""
        content = [{"type": "reasoning_text", "text": part.text} for part in self.content or ()]
        return self._kept("reasoning", "rs", summary=[], content=content)


class ItemReference(Strict):
    """An item of a stored response's conversation, by its id."""

    type: Literal["item_reference"] | None = None
    id: Annotated[str, Field(min_length=1)]


class OtherItem(Strict):
    """An item of another type: one that is left out, or one that is not built."""

    types: ClassVar = "types of input items"

    type: Annotated[
        str,
        NotBuilt(
            why="the model would not read it", instead="send message, reasoning, or calls and their outputs"
        ),
    ]


_TAGS = (
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "reasoning",
    "item_reference",
    "message",
)


def _tag(item: Any) -> str:
    kind = type_of(item)
    if kind is None:
        is_reference = isinstance(item, dict) and "role" not in item and "id" in item
        return "item_reference" if is_reference else "message"
    if kind == "custom_tool_call_output":
        return "function_call_output"
    return kind if kind in _TAGS else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_tag),
]

Input = Annotated[list[InputItem], text_or(list[InputItem])]


def custom_input(arguments: str) -> str:
    """The custom tool's input within its function's arguments; all of them if the call was cut off."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    given = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return given if isinstance(given, str) else arguments


def kept_items(given: Any, referred: Mapping[str, Item]) -> list[Item]:
    """The stored form of the items of an `input`, of which a text is a user's message.

    `referred` has, by id, the items that references name. Items that the model does not read are left out.
    """
    if isinstance(given, str):
        return [MessageItem(role="user", content=given).kept()]  # pyright: ignore[reportArgumentType]
    return [
        referred[item.id] if isinstance(item, ItemReference) else item.kept()
        for item in given
        if not isinstance(item, OtherItem)
    ]


def messages_of(instructions: str | None, items: Sequence[Item], n_earlier: int) -> list[ChatMessage]:
    """The chat messages: `instructions` as a system message, then the items.

    The first `n_earlier` items are the conversation of `previous_response_id`. The reasoning, text and calls
    of one turn of the model become one message. Raises InvalidRequest, which names the item.
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
    """The assistant's message that the next item belongs to: the last message, or a new one."""
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
