"""The fields of POST /v1/messages and /v1/messages/count_tokens, and the blocks of a message's content."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from orca_jax.errors import InvalidRequest
from orca_jax.request.chat.tools import ToolWish, check_tools
from orca_jax.request.generation_defaults import GenerationDefaults
from orca_jax.request.sampling_params import SamplingParams, with_defaults
from server.errors import UnknownThread
from server.http.fields.generation import SchedulingFields, SharedSamplingFields, renamed_tool_fields
from server.http.fields.generation import Texts as StopTexts
from server.http.fields.strict import NotBuilt, Strict, Unused, by_type, text_or, type_of
from server.http.fields.tools import NamedFunction, check_left_out, tool_wish
from server.http.fields.tools import ToolChoice as ChatToolChoice

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
    """A tool call that the model made."""

    place: ClassVar = _PLACE

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]


class OtherBlock(Strict):
    """A block of another type: one that is left out, or one that is not built, such as an image."""

    types: ClassVar = "types of blocks of messages"

    type: Annotated[
        str,
        NotBuilt(why="the model would not read it", instead="send text, thinking, tool_use or tool_result"),
    ]


OneText = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("other")], by_type("text", other="other")
]
Texts = Annotated[list[OneText], text_or(list[OneText])]


class ToolResultBlock(Strict):
    """The result of a tool call."""

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
    by_type("text", "thinking", "tool_use", "tool_result", other="other"),
]
Blocks = Annotated[list[Block], text_or(list[Block])]


class InputMessage(Strict):
    """A message. If the last message is the assistant's, the reply continues it."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    clear_at: Annotated[str | None, NotBuilt("never", why="the model would read the message longer")] = None
    output_config: Annotated[
        dict[str, Any] | None, NotBuilt({}, why="the turn would have the request's effort")
    ] = None


def texts_of(content: Any) -> list[str]:
    """The texts of a message's content, which has text blocks only."""
    return [content] if isinstance(content, str) else [block.text for block in content or ()]


LEAST_BUDGET = 1024


class Tool(Strict):
    """A tool that the model may use."""

    place: ClassVar = "tools of messages"

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: Annotated[bool | None, Field(description="whether the input must follow its schema")] = None

    allowed_callers: Annotated[
        list[str] | None, NotBuilt(["direct"], why="the model would call it directly")
    ] = None
    input_examples: Annotated[list[Any] | None, NotBuilt([], why="the model would not see them")] = None

    def for_chat(self) -> dict[str, Any]:
        """Convert the tool to the form that chat templates read."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ServerTool(Strict):
    """A tool that Anthropic runs itself, or one whose schema only its models know."""

    types: ClassVar = "types of tools of messages"

    type: Annotated[str, NotBuilt("custom", why="the model would not know the tool")]


def _tool_kind(tool: Any) -> str:
    return "tool" if type_of(tool) in (None, "custom") else "server"


AnyTool = Annotated[
    Annotated[Tool, Tag("tool")] | Annotated[ServerTool, Tag("server")], Discriminator(_tool_kind)
]


class ToolChoice(Strict):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Field(description="with type tool")] = None
    disable_parallel_tool_use: Annotated[
        bool | None, Field(description="whether a reply may have at most one call")
    ] = None


class Thinking(Strict):
    """`thinking`: whether the model reasons before it replies, if its chat template has a switch for that."""

    place: ClassVar = "thinking"

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[
        int | None,
        Field(description="with enabled, a target below max_tokens; only max_tokens ends the reasoning"),
    ] = None


class OutputFormat(Strict):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema", description="the text follows this schema")]


class OutputConfig(Strict):
    """`output_config`."""

    place: ClassVar = "output_config"

    format: OutputFormat | None = None
    effort: Annotated[
        str | None,
        Field(description="a variable of the chat template; not used if the template does not read it"),
    ] = None


class Metadata(Strict):
    """`metadata`."""

    user_id: Annotated[str | None, Field(description="written to the access log")] = None


class Thread(Strict):
    """`thread`: a conversation kept by the server, so that the client sends only the new messages.

    This server keeps none. It answers the first request of a thread, and answers 404 to a request that
    continues one, upon which Anthropic's clients send the whole conversation.
    """

    type: Literal["create", "continue"]
    previous_message_id: Annotated[str | None, Field(description="with continue")] = None


class PromptFields(Strict):
    """The fields that decide the prompt."""

    place: ClassVar = "/v1/messages"

    model: Annotated[str | None, Field(description="default: the served model")] = None
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Annotated[Texts | None, Field(description="a system message before the messages")] = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    compaction: Annotated[dict[str, Any] | None, NotBuilt(why="nothing is summarised")] = None
    mcp_servers: Annotated[list[Any] | None, NotBuilt([], why="their tools would be missing")] = None
    thread: Thread | None = None

    def take(self, unused: Unused) -> None:
        """Check the fields. Raises a subclass of InvalidRequest, and UnknownThread."""
        super().take(unused)
        if self.thread is not None:
            if self.thread.type == "continue":
                message = "thread.previous_message_id is unknown: no conversation is kept; send all messages"
                raise UnknownThread(message)
            unused.note("thread", "the server keeps no conversations; send all messages each time")
        forced = self.tool_choice is not None and self.tool_choice.type == "any"
        check_left_out(self.tools, ServerTool, forced=forced)

    @property
    def client_names(self) -> dict[str, str]:
        """The client's names for the prompt and the reasoning effort; see `renamed_fields`."""
        return {"prompt": "messages", "reasoning_effort": "output_config.effort"}

    @property
    def uses_tools(self) -> bool:
        return self.tool_choice is None or self.tool_choice.type != "none"

    @property
    def effort(self) -> str | None:
        return None if self.output_config is None else self.output_config.effort

    def wish(self, tools: Sequence[dict[str, Any]]) -> ToolWish:
        given = self.tool_choice or ToolChoice(type="auto")
        choice: Any = {"any": "required"}.get(given.type, given.type)
        if given.type == "tool":
            choice = ChatToolChoice(type="function", function=NamedFunction(name=given.name or ""))
        with renamed_tool_fields(parameters="input_schema"):
            return tool_wish(check_tools(tools), choice, parallel=not given.disable_parallel_tool_use)

    def check(self) -> None:
        """Check combinations of fields. Raises InvalidRequest, which names the field."""
        choice = self.tool_choice
        if choice is not None and (choice.name is not None) != (choice.type == "tool"):
            message = f"tool_choice.type is {choice.type!r}; a name goes with 'tool', and only with it"
            raise InvalidRequest(message, param="tool_choice.name")


class CountTokensRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


class MessageRequest(PromptFields, SharedSamplingFields, SchedulingFields):
    """POST /v1/messages. Null means the default for every field."""

    max_tokens: Annotated[
        int,
        Field(
            description="maximum number of output tokens; fewer if the model has no room for them",
            json_schema_extra={"minimum": 1},
        ),
    ]
    stop_sequences: Annotated[
        StopTexts | None,
        Field(description="up to 16 texts of 1 to 1024 characters; the output ends before the first of them"),
    ] = None
    stream: Annotated[bool | None, Field(description="respond with server-sent events")] = None
    metadata: Metadata | None = None

    container: Annotated[
        str | dict[str, Any] | None, NotBuilt(why="its files and skills would be missing")
    ] = None

    @property
    def client_names(self) -> dict[str, str]:
        """The client's names for fields of `SamplingParams` and for the prompt; see `renamed_fields`."""
        return {
            **super().client_names,
            "stop": "stop_sequences",
            "guided_json": "output_config.format.schema",
        }

    @property
    def user(self) -> str | None:
        return None if self.metadata is None else self.metadata.user_id

    def check(self) -> None:
        """Check combinations of fields. Raises InvalidRequest, which names the field."""
        super().check()
        thinking = self.thinking
        if thinking is None:
            return
        budget = thinking.budget_tokens
        if (budget is not None) != (thinking.type == "enabled"):
            message = f"thinking.type is {thinking.type!r}; budget_tokens go with 'enabled', and only with it"
            raise InvalidRequest(message, param="thinking.budget_tokens")
        if budget is not None and not LEAST_BUDGET <= budget < self.max_tokens:
            message = f"thinking.budget_tokens is {budget}; it must be at least {LEAST_BUDGET} and below "
            message += f"max_tokens, which is {self.max_tokens}"
            raise InvalidRequest(message, param="thinking.budget_tokens")

    def sampling(self, defaults: GenerationDefaults, *, longest: int) -> SamplingParams:
        given = self.given()
        if self.stop_sequences is not None:
            given["stop"] = self.stop_sequences
        if self.output_config is not None and self.output_config.format is not None:
            given["guided_json"] = self.output_config.format.schema_
        room = longest if longest > 0 else max(self.min_tokens or 0, 1)
        return SamplingParams(
            **{**with_defaults(defaults.sampling, given), "max_tokens": min(self.max_tokens, room)}
        )
