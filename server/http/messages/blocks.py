"""The messages of Anthropic's protocol and the blocks of their content, as clients may send them."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, WrapValidator

from server.http.fields.not_built import NotBuilt
from server.http.fields.strict import Strict

_PLACE = "blocks of messages"


class TextBlock(Strict):
    """A text."""

    place: ClassVar = _PLACE

    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    """Reasoning of an earlier reply."""

    place: ClassVar = _PLACE

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Strict):
    """A call that the model made."""

    place: ClassVar = _PLACE

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]


class OtherBlock(Strict):
    """A block that is left out, or one of a feature that is not built, such as an image."""

    types: ClassVar = "types of blocks of messages"

    type: Annotated[
        str,
        NotBuilt(why="the model would not read it", instead="send text, thinking, tool_use or tool_result"),
    ]


def _tag_of(*known: str) -> Callable[[Any], str]:
    """What chooses the class of a block by its `type`: the type itself if it is known, else "other"."""

    def tag(block: Any) -> str:
        kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        return kind if kind in known else "other"

    return tag


def _text_or_list(content: Any, blocks: Callable[[Any], Any]) -> Any:
    return content if isinstance(content, str) else blocks(content)


OneText = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("other")], Discriminator(_tag_of("text"))
]
Texts = Annotated[
    list[OneText],
    WrapValidator(_text_or_list, json_schema_input_type=str | list[OneText]),
]


class ToolResultBlock(Strict):
    """What the client's tool returned."""

    place: ClassVar = _PLACE

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: Texts | None = None
    is_error: Annotated[
        bool | None, Field(description='the tool failed: the model reads "Error: " before the content')
    ] = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_tag_of("text", "thinking", "tool_use", "tool_result")),
]
Blocks = Annotated[
    list[Block],
    WrapValidator(_text_or_list, json_schema_input_type=str | list[Block]),
]


class InputMessage(Strict):
    """A message. A last one of the assistant is continued by the reply."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    clear_at: Annotated[str | None, NotBuilt("never", why="the model would read the message longer")] = None
    output_config: Annotated[
        dict[str, Any] | None, NotBuilt({}, why="the turn would have the request's effort")
    ] = None


def texts_of(content: Any) -> list[str]:
    """The texts of a content that has only texts."""
    return [content] if isinstance(content, str) else [block.text for block in content or ()]
