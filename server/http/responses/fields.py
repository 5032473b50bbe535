"""The fields of POST /v1/responses."""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from orca_jax.errors import InvalidRequest
from orca_jax.request.chat.tools import ToolWish, check_tools
from orca_jax.request.generation_defaults import GenerationDefaults
from orca_jax.request.sampling_params import MAX_TOP_LOGPROBS, SamplingParams, with_defaults
from server.http.fields.generation import SchedulingFields, SharedSamplingFields, ranged, renamed_tool_fields
from server.http.fields.hints import HINTS
from server.http.fields.strict import NotBuilt, Strict, Unused
from server.http.fields.tools import AllowedTools, NamedFunction, ToolChoice, check_left_out, tool_wish
from server.http.responses.items import Input
from server.http.responses.tools import HostedTool, OfferedTools, ResponseTool, joined_name

LOGPROBS = "message.output_text.logprobs"
_GRAMMAR = HINTS["custom tools"]["format"]
_INCLUDES = HINTS["include"]
MAX_METADATA = 16
MAX_KEY, MAX_VALUE = 64, 512  # characters in metadata


class TextFormat(Strict):
    """`text.format`."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        Field(description="any text; any JSON object; JSON that follows schema"),
    ]
    name: Annotated[str | None, Field(description="with json_schema: for readers; has no effect")] = None
    schema_: Annotated[
        dict[str, Any] | None, Field(alias="schema", description="with json_schema: the text follows it")
    ] = None
    strict: Annotated[bool | None, Field(description="has no effect: the schema is always enforced")] = None
    description: Annotated[str | None, Field(description="for readers; has no effect")] = None

    def guided(self) -> dict[str, Any]:
        """The equivalent fields of `SamplingParams`. Raises InvalidRequest if fields contradict `type`."""
        if self.type == "json_schema":
            for field, value in (("name", self.name), ("schema", self.schema_)):
                if value is None:
                    message = f"text.format.{field} is missing; type 'json_schema' needs it"
                    raise InvalidRequest(message, param=f"text.format.{field}")
            return {"guided_json": self.schema_}
        if self.schema_ is not None:
            message = f"text.format.schema is given with type {self.type!r}; it goes with 'json_schema'"
            raise InvalidRequest(message, param="text.format.schema")
        return {"guided_json_object": True} if self.type == "json_object" else {}


class TextConfig(Strict):
    """`text`."""

    place: ClassVar = "text"

    format: Annotated[TextFormat | None, Field(description="default: any text")] = None


class NamedTool(Strict):
    """A function or a custom tool of `tools`."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @property
    def joined(self) -> str:
        """The name by which the model knows the tool."""
        return joined_name(self.namespace, self.name)


class AllowedToolNames(Strict):
    """`tool_choice`: only these may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ReasoningConfig(Strict):
    """`reasoning`."""

    place: ClassVar = "reasoning"

    effort: Annotated[
        str | None,
        Field(description="a variable of the chat template; not used if the template does not read it"),
    ] = None

    mode: Annotated[str | None, NotBuilt("standard", why="the model would think no longer")] = None


class ResponseStreamOptions(Strict):
    """`stream_options`."""

    place: ClassVar = "stream_options"


class ResponseRequest(SharedSamplingFields, SchedulingFields):
    """POST /v1/responses. Null means the default for every field."""

    place: ClassVar = "/v1/responses"

    model: Annotated[str | None, Field(description="default: the served model")] = None
    input: Annotated[Input, Field(description="a text, or items")]
    instructions: Annotated[
        str | None, Field(description="a system message before the input; not kept for the next response")
    ] = None
    previous_response_id: Annotated[
        str | None, Field(description="continue the conversation of this response, which must be stored")
    ] = None
    store: Annotated[
        bool | None,
        Field(description="keep the response for a while; default: true if the server stores responses"),
    ] = None
    stream: Annotated[bool | None, Field(description="respond with server-sent events")] = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[
        int | None, ranged("default: as many as the model has room for", 1, 1 << 30)
    ] = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | AllowedToolNames | None,
        Field(description="auto (default): the model may call tools; required: it must; or the tool to call"),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="whether a reply may have several calls; default true")
    ] = None
    reasoning: ReasoningConfig | None = None
    metadata: Annotated[
        dict[str, str] | None,
        Field(description=f"up to {MAX_METADATA} texts, which are returned with the response"),
    ] = None
    include: Annotated[
        list[str] | None, Field(description=f"{LOGPROBS}; accepted but not used are {', '.join(_INCLUDES)}")
    ] = None
    top_logprobs: Annotated[
        int | None,
        ranged(
            "with log-probabilities: also return this many of the most likely tokens", 0, MAX_TOP_LOGPROBS
        ),
    ] = None
    user: Annotated[str | None, Field(description="written to the access log")] = None

    truncation: Annotated[
        str | None,
        NotBuilt("disabled", why="a conversation that is too long would be refused, not shortened"),
    ] = None
    background: Annotated[
        bool | None, NotBuilt(False, why="the response would not outlive its connection")
    ] = None
    conversation: Annotated[
        str | dict[str, Any] | None,
        NotBuilt(why="its items would be missing", instead="use previous_response_id"),
    ] = None
    prompt: Annotated[dict[str, Any] | None, NotBuilt(why="its text would be missing")] = None
    moderation: Annotated[dict[str, Any] | None, NotBuilt(why="nothing is checked")] = None

    def take(self, unused: Unused) -> None:
        """Check the fields. Raises a subclass of InvalidRequest."""
        super().take(unused)
        for name in self.include or ():
            if name in _INCLUDES:
                unused.note(f"include.{name}", _INCLUDES[name].reason, param="include")
            elif name != LOGPROBS:
                values = ", ".join((LOGPROBS, *_INCLUDES))
                raise InvalidRequest(f"include has {name[:80]!r}; it can have {values}", param="include")
        for path in self.offered.grammars:
            unused.note("tools.format", _GRAMMAR.reason, param=f"{path}.format")
        check_left_out(self.tools, HostedTool, forced=self.tool_choice == "required")

    @cached_property
    def offered(self) -> OfferedTools:
        """The tools that the model is offered."""
        return OfferedTools(self.tools or ())

    @property
    def client_names(self) -> dict[str, str]:
        """The client's names for fields of `SamplingParams` and for the prompt; see `renamed_fields`."""
        return {
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "guided_json": "text.format.schema",
            "guided_json_object": "text.format",
            "prompt": "input",
            "messages": "input",
            "reasoning_effort": "reasoning.effort",
        }

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def format(self) -> TextFormat | None:
        return None if self.text is None else self.text.format

    @property
    def uses_tools(self) -> bool:
        return self.tool_choice != "none"

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    def wish(self, tools: Sequence[dict[str, Any]]) -> ToolWish:
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            choice = ToolChoice(type="function", function=NamedFunction(name=choice.joined))
        elif isinstance(choice, AllowedToolNames):
            named = [{"function": {"name": tool.joined}} for tool in choice.tools]
            allowed = AllowedTools(mode=choice.mode, tools=named)
            choice = ToolChoice(type="allowed_tools", allowed_tools=allowed)
        with renamed_tool_fields():
            return tool_wish(
                check_tools(tools, self.offered.paths), choice, parallel=self.parallel_tool_calls is not False
            )

    def check(self) -> None:
        """Check combinations of fields. Raises a subclass of InvalidRequest, which names the field."""
        if self.top_logprobs and not self.with_logprobs:
            message = (
                f"top_logprobs is {self.top_logprobs} without log-probabilities; add {LOGPROBS} to include"
            )
            raise InvalidRequest(message, param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            message = "stream_options are for a stream; set stream to true, or leave them out"
            raise InvalidRequest(message, param="stream_options")
        self._check_metadata(self.metadata or {})

    def sampling(self, defaults: GenerationDefaults, *, longest: int) -> SamplingParams:
        given = self.given()
        if self.format is not None:
            given |= self.format.guided()
        most = self.most_tokens(self.max_output_tokens, defaults.max_tokens, longest)
        logprobs = (self.top_logprobs or 0) if self.with_logprobs else None
        return SamplingParams(
            **{**with_defaults(defaults.sampling, given), "max_tokens": most, "logprobs": logprobs}
        )

    def _check_metadata(self, metadata: dict[str, str]) -> None:
        if len(metadata) > MAX_METADATA:
            message = f"metadata has {len(metadata)} entries; {MAX_METADATA} are allowed"
            raise InvalidRequest(message, param="metadata")
        for key, value in metadata.items():
            for what, text, most in (("key", key, MAX_KEY), ("value", value, MAX_VALUE)):
                if len(text) > most:
                    message = f"metadata has a {what} of {len(text)} characters; {most} are allowed"
                    raise InvalidRequest(message, param="metadata")
