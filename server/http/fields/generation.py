"""The request and response fields that chat and completions share, besides those of sampling.py."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from orca_jax.errors import InvalidRequest, NotSupported
from orca_jax.request.sampling_params import SamplingParams, with_defaults
from server.http.fields.not_built import NotBuilt
from server.http.fields.response_format import ResponseFormat
from server.http.fields.sampling import SchedulingFields, SharedSamplingFields, Texts, listed, ranged
from server.http.fields.strict import Strict

FinishReason = Literal["stop", "length", "tool_calls"]
_GRAMMAR: dict[str, Any] = {"minLength": 1, "maxLength": 1 << 16}

# Where a message names fields: "top_k is 7; ...", "seed and n are both given; ...". The rest may quote the
# client.
_NAMED = re.compile(r"\A(\w+)(?:( and )(\w+)(?= are both given))?")


class SamplingFields(SharedSamplingFields):
    """How chat and completions ask for output."""

    n: Annotated[int | None, ranged("choices per prompt; default 1", 1, 1 << 16)] = None
    max_tokens: Annotated[int | None, ranged("maximum number of output tokens", 1, 1 << 30)] = None
    max_completion_tokens: Annotated[int | None, ranged("an alias of max_tokens", 1, 1 << 30)] = None
    stop: Annotated[
        str | Texts | None,
        Field(description="up to 16 texts of 1 to 1024 characters; the output ends before the first of them"),
    ] = None
    response_format: Annotated[
        ResponseFormat | None, Field(description="structure of the output; default: any text")
    ] = None
    guided_json: Annotated[
        str | dict[str, Any] | None,
        Field(description="an extension: the output follows this JSON schema, given as an object or as text"),
    ] = None
    guided_regex: Annotated[
        str | None,
        Field(
            description="an extension: the whole output matches this regular expression",
            json_schema_extra=_GRAMMAR,
        ),
    ] = None
    guided_choice: Annotated[Texts | None, listed("an extension: the output is one of these", 1, 1024)] = None
    guided_grammar: Annotated[
        str | None,
        Field(
            description="an extension: the output follows this grammar in Lark's syntax",
            json_schema_extra=_GRAMMAR,
        ),
    ] = None
    use_beam_search: Annotated[
        bool | None,
        Field(description="an extension: the choices are the n best of a beam search; not with stream"),
    ] = None
    best_of: Annotated[
        int | None,
        Field(description="the beams of use_beam_search, from n (the default) to 16; without it 1 or n"),
    ] = None
    length_penalty: Annotated[
        float | None,
        Field(
            description="an extension: a beam's score is its log-probability over its length to this power; "
            "-10 to 10, default 1, and no other without use_beam_search"
        ),
    ] = None
    early_stopping: Annotated[
        bool | Literal["never"] | None,
        Field(description="an extension: when use_beam_search ends; default false"),
    ] = None

    @property
    def n_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def wanted_tokens(self) -> int | None:
        """`max_tokens` or its alias. Raises InvalidRequest if they contradict each other."""
        value, alias = self.max_tokens, self.max_completion_tokens
        if value is not None and alias is not None and value != alias:
            message = f"max_tokens is {value} and max_completion_tokens is {alias}; give one of them"
            raise InvalidRequest(message, param="max_completion_tokens")
        return value if alias is None else alias

    @property
    def client_names(self) -> dict[str, str]:
        """The client's names for fields of `SamplingParams`, where they differ; see `renamed_fields`."""
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        structured = {} if self.response_format is None else self.response_format.client_names
        return {"max_tokens": name, **structured}

    def sampling_params(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """The request's sampling parameters. `more` are those that each route names differently; `defaults`
        are the model's.

        Raises a subclass of InvalidRequest, which names the field as `SamplingParams` does.
        """
        given = self.given()
        if self.response_format is not None:
            guided = self.response_format.guided()
            for name in given if guided else ():
                if name.startswith("guided_"):
                    message = f"response_format and {name} are both given; an output follows one grammar"
                    raise InvalidRequest(message, param="response_format")
            given |= guided
        return SamplingParams(**{**with_defaults(defaults, given), **more})


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: Annotated[bool | None, Field(description="send a final chunk with the usage")] = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="an extension: every chunk has the usage so far")
    ] = None
    include_obfuscation: Annotated[bool | None, NotBuilt(False)] = None


class GenerationRequest(SamplingFields, SchedulingFields):
    """The fields that both routes accept."""

    model: Annotated[str | None, Field(description="default: the served model")] = None
    stream: Annotated[bool | None, Field(description="respond with server-sent events")] = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, Field(description="written to the access log")] = None
    prompt_logprobs: Annotated[int | None, NotBuilt(instead="use echo with logprobs (/v1/completions)")] = (
        None
    )
    include_stop_str_in_output: Annotated[bool | None, NotBuilt(False)] = None
    skip_special_tokens: Annotated[bool | None, NotBuilt(True)] = None
    spaces_between_special_tokens: Annotated[bool | None, NotBuilt(True)] = None
    truncate_prompt_tokens: Annotated[int | None, NotBuilt()] = None
    return_token_ids: Annotated[bool | None, NotBuilt(False)] = None

    def check_stream_options(self) -> None:
        """Raise InvalidRequest for `stream_options` without `stream`, or a stream of a beam search."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options are for a stream; set stream to true, or leave them out"
            raise InvalidRequest(message, param="stream_options")
        if self.use_beam_search and self.stream:
            message = "stream and use_beam_search are both given; a beam search has no output before its end"
            raise NotSupported(message, param="stream")


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens, those whose keys and values were in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Of the output's tokens, those that are reasoning or its markers."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Token counts. A prompt counts once, however many choices it has. Null fields are left out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[
        CompletionTokensDetails | None, Field(description="of a model whose format of reasoning is known")
    ] = None


@contextmanager
def renamed_fields(**names: str) -> Iterator[None]:
    """Rename fields in any InvalidRequest raised inside: `renamed_fields(prompt="messages")`."""

    def renamed(match: re.Match[str]) -> str:
        return "".join(names.get(part, part) for part in match.groups("") if part)

    try:
        yield
    except InvalidRequest as error:
        param, message = names.get(error.param, error.param), _NAMED.sub(renamed, str(error))
        if (param, message) == (error.param, str(error)):
            raise
        raise type(error)(message, param=param) from error


@contextmanager
def renamed_tool_fields(**names: str) -> Iterator[None]:
    """Rename the fields of `tools` and `tool_choice` in any InvalidRequest raised inside.

    `check_tools` and `tool_wish` name those of chat: `tools.0.function.NAME`. `names` are those of another
    protocol, where they differ: it has `tools.0.NAME`.
    """

    def renamed(path: str) -> str:
        head, _, name = path.partition("function.")
        return f"{head}{names.get(name, name)}" if name else path

    try:
        yield
    except InvalidRequest as error:
        if error.param is None or "function." not in error.param:
            raise
        raise type(error)(
            str(error).replace(error.param, renamed(error.param)), param=renamed(error.param)
        ) from error
