"""The items of `input`: messages, tool calls and their outputs, and reasoning, as clients may send them.

`kept` gives each the form that the store, GET input_items and the next request see.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, WrapValidator

from server.http.fields.not_built import NotBuilt
from server.http.fields.strict import FirstFault, Strict
from server.http.generation.answer import new_id

Item = dict[str, Any]  # an item as it is kept
_Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(Strict):
    """A part of a message's content, or of a tool's output."""

    type: Annotated[
        Literal["input_text", "output_text", "refusal", "input_image", "input_file", "input_audio"],
        NotBuilt("input_text", "output_text"),
    ]
    text: str | None = None
    annotations: Annotated[list[Any] | None, NotBuilt([])] = None
    logprobs: Annotated[
        list[Any] | None, Field(description="of an earlier reply that is sent back; has no effect")
    ] = None

    refusal: Annotated[str | None, NotBuilt()] = None
    image_url: Annotated[str | None, NotBuilt()] = None
    detail: Annotated[str | None, NotBuilt()] = None
    file_id: Annotated[str | None, NotBuilt()] = None
    file_data: Annotated[str | None, NotBuilt()] = None
    file_url: Annotated[str | None, NotBuilt()] = None
    filename: Annotated[str | None, NotBuilt()] = None
    input_audio: Annotated[dict[str, Any] | None, NotBuilt()] = None
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, NotBuilt()] = None


def _text_or_list(content: Any, parts: Callable[[Any], Any]) -> Any:
    return content if isinstance(content, str) else parts(content)


Content = Annotated[
    Annotated[list[InputPart], FirstFault()],
    WrapValidator(_text_or_list, json_schema_input_type=str | list[InputPart]),
]


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part.text or "" for part in content]


class MessageItem(Strict):
    """A message: a new one, or one of an earlier response's output."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: _Status | None = None
    phase: Annotated[str | None, NotBuilt()] = None

    def kept(self) -> Item:
        """The message with an id, and its content as parts."""
        part = {"type": "input_text"}
        if self.role == "assistant":
            part = {"type": "output_text", "annotations": []}
        return {
            "type": "message",
            "id": self.id or new_id("msg"),
            "role": self.role,
            "status": self.status or "completed",
            "content": [{**part, "text": text} for text in _texts(self.content)],
        }


class CallItem(Strict):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, Field(description="the text of a JSON object")]
    id: str | None = None
    status: _Status | None = None

    namespace: Annotated[str | None, NotBuilt()] = None
    caller: Annotated[dict[str, Any] | None, NotBuilt()] = None

    def kept(self) -> Item:
        """The call with an id."""
        return {
            "type": "function_call",
            "id": self.id or new_id("fc"),
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
            "status": self.status or "completed",
        }


class CallOutputItem(Strict):
    """What the client's function returned."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Content
    id: str | None = None
    status: _Status | None = None

    name: Annotated[str | None, NotBuilt()] = None
    namespace: Annotated[str | None, NotBuilt()] = None
    caller: Annotated[dict[str, Any] | None, NotBuilt()] = None

    def kept(self) -> Item:
        """The output with an id, as one text."""
        return {
            "type": "function_call_output",
            "id": self.id or new_id("fco"),
            "call_id": self.call_id,
            "output": "\n".join(_texts(self.output)),
            "status": self.status or "completed",
        }


class ReasoningPart(Strict):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[
        Annotated[list[ReasoningPart], FirstFault()] | None, NotBuilt([], instead="send content")
    ] = None
    content: Annotated[list[ReasoningPart], FirstFault()] | None = None
    status: _Status | None = None

    encrypted_content: Annotated[str | None, NotBuilt(instead="send content")] = None

    def kept(self) -> Item:
        """The reasoning with an id."""
        return {
            "type": "reasoning",
            "id": self.id or new_id("rs"),
            "summary": [],
            "content": [{"type": "reasoning_text", "text": part.text} for part in self.content or ()],
            "status": self.status or "completed",
        }


class OtherItem(Strict):
    """An item of a feature that is not built."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, NotBuilt(instead="send message, function_call, function_call_output or reasoning")]

    def kept(self) -> Item:
        """Never called: such an item is refused."""
        raise NotImplementedError


_KINDS = {
    "function_call": "function_call",
    "function_call_output": "function_call_output",
    "reasoning": "reasoning",
    "message": "message",
    None: "message",
}


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return _KINDS.get(kind, "other") if isinstance(kind, str | None) else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind),
]

Input = Annotated[
    Annotated[list[InputItem], FirstFault()],
    WrapValidator(_text_or_list, json_schema_input_type=str | list[InputItem]),
]


def kept_items(given: Any) -> list[Item]:
    """The items of an `input`; a text is a user's message."""
    if isinstance(given, str):
        return [MessageItem(role="user", content=given).kept()]  # pyright: ignore[reportArgumentType]
    return [item.kept() for item in given]
