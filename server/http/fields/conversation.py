"""The request fields that describe a conversation: its messages and how the chat template renders them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from server.http.fields.strict import NotBuilt, Strict, Unused, null_is, text_or
from server.http.fields.tools import checked_tools


class ContentPart(Strict):
    """A part of a message's content."""

    place: ClassVar = "content parts of chat"

    type: Annotated[
        Literal["text", "refusal", "image_url", "input_audio", "video_url", "file"],
        NotBuilt("text", why="the model reads text alone"),
    ]
    text: str | None = None

    refusal: Annotated[str | None, NotBuilt(why="chat templates have no place for it")] = None
    image_url: Annotated[dict[str, Any] | None, NotBuilt(why="the model reads text alone")] = None
    input_audio: Annotated[dict[str, Any] | None, NotBuilt(why="the model reads text alone")] = None
    video_url: Annotated[dict[str, Any] | None, NotBuilt(why="the model reads text alone")] = None
    file: Annotated[dict[str, Any] | None, NotBuilt(why="the model reads text alone")] = None


Content = Annotated[list[ContentPart], text_or(list[ContentPart])]


class CalledFunction(Strict):
    """The function of a tool call."""

    place: ClassVar = "tool_calls.function of chat"

    name: str
    arguments: Annotated[
        str | dict[str, Any], Field(description="a JSON object, or its text as in OpenAI's API")
    ]


class ToolCall(Strict):
    """A tool call of an earlier reply."""

    place: ClassVar = "tool_calls of chat"

    id: str | None = None
    type: Annotated[Literal["function"], null_is("function")] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    """A message. A template that does not mention the role `developer` gets `system` instead."""

    place: ClassVar = "messages of chat"

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        NotBuilt("system", "developer", "user", "assistant", "tool", why="chat templates do not know it"),
    ]
    content: Annotated[
        Content | None, Field(description="a text, or parts of type text; null with tool_calls")
    ] = None
    name: Annotated[str | None, Field(description="passed to the chat template")] = None
    tool_calls: Annotated[list[ToolCall] | None, Field(description="only in an assistant's message")] = None
    tool_call_id: Annotated[
        str | None, Field(description="only in a tool's message: the call that it answers")
    ] = None
    reasoning_content: Annotated[
        str | None, Field(description="an extension: an assistant's reasoning before the message")
    ] = None
    reasoning: Annotated[str | None, Field(description="an alias of reasoning_content")] = None

    refusal: Annotated[str | None, NotBuilt(why="chat templates have no place for it")] = None
    audio: Annotated[dict[str, Any] | None, NotBuilt(why="the model reads text alone")] = None
    function_call: Annotated[dict[str, Any] | None, NotBuilt(why="chat templates know tool_calls")] = None


Messages = list[ChatMessage]


class ConversationFields(Strict):
    """The conversation fields, named as in vLLM and in Hugging Face's tokenizers."""

    messages: Annotated[Messages, Field(min_length=1)]
    tools: Annotated[
        list[dict[str, Any]] | None,
        Field(description='{"type": "function", "function": {"name": ..., ...}}, for the chat template'),
    ] = None
    documents: Annotated[
        list[dict[str, Any]] | None, Field(description="an extension: documents for the chat template")
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        Field(description="an extension: begin the reply; default true, or false to continue a message"),
    ] = None
    continue_final_message: Annotated[
        bool | None, Field(description="an extension: the reply continues the last message")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Field(description="an extension: add special tokens; default false, because the template has them"),
    ] = None
    chat_template: Annotated[
        str | None, Field(description="an extension: name of one of the model's chat templates")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="an extension: variables of the chat template")
    ] = None

    def take(self, unused: Unused) -> None:
        """Check the fields, and drop those that the chat template should not see."""
        super().take(unused)
        for message in self.messages:
            if message.reasoning is not None:
                message.reasoning_content = message.reasoning_content or message.reasoning
                message.reasoning = None
        if self.tools is not None:
            self.tools = checked_tools(self.tools, unused)
