"""The request and response fields that generating routes share, strictly typed and named as in OpenAI's API.

Most request fields are fields of `SamplingParams`. The schema states their ranges as documentation;
`SamplingParams` enforces them, and `renamed_fields` translates its errors to the client's names.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from orca_jax.errors import InvalidRequest, NotSupported
from orca_jax.request.kv_transfer import KVTransferParams
from orca_jax.request.sampling_params import (
    MAX_BAD_WORDS,
    MAX_TOP_LOGPROBS,
    REPETITION_RANGE,
    TEMPERATURE_RANGE,
    TOP_P_RANGE,
    SamplingParams,
    with_defaults,
)
from orca_jax.request.scheduling_params import MAX_CACHE_SALT, PLAIN, PRIORITY_RANGE, SchedulingParams
from server.http.fields.strict import NotBuilt, Strict

_FIELD = "response_format.json_schema"


class JsonSchema(Strict):
    """`response_format.json_schema`."""

    name: Annotated[str, Field(description="for readers; has no effect")]
    schema_: Annotated[dict[str, Any], Field(alias="schema", description="the output follows this schema")]
    strict: Annotated[bool | None, Field(description="has no effect: the schema is always enforced")] = None
    description: Annotated[str | None, Field(description="for readers; has no effect")] = None


class ResponseFormat(Strict):
    """`response_format`."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        Field(description="any text; any JSON object; JSON that follows json_schema"),
    ]
    json_schema: Annotated[JsonSchema | None, Field(description="only with type json_schema")] = None

    @property
    def client_names(self) -> dict[str, str]:
        """The client's names for the fields that `guided` returns; see `renamed_fields`."""
        return {
            "text": {},
            "json_object": {"guided_json_object": "response_format"},
            "json_schema": {"guided_json": f"{_FIELD}.schema"},
        }[self.type]

    def guided(self) -> dict[str, Any]:
        """The equivalent fields of `SamplingParams`; empty for plain text.

        Raises InvalidRequest if `type` and `json_schema` contradict each other.
        """
        if self.type == "json_schema":
            if self.json_schema is None:
                message = f"{_FIELD} is missing; give it, as {{'name': ..., 'schema': {{...}}}}"
                raise InvalidRequest(message, param=_FIELD)
            return {"guided_json": self.json_schema.schema_}
        if self.json_schema is not None:
            message = f"{_FIELD} is given with response_format.type {self.type!r}; it goes with 'json_schema'"
            raise InvalidRequest(message, param=_FIELD)
        return {"guided_json_object": True} if self.type == "json_object" else {}


FinishReason = Literal["stop", "length", "tool_calls"]
_GRAMMAR: dict[str, Any] = {"minLength": 1, "maxLength": 1 << 16}

# Where a message names fields: "top_k is 7; ...", "seed and n are both given; ...". The rest may quote the
# client, and is left alone.
_NAMED = re.compile(r"\A(\w+)(?:( and )(\w+)(?= are both given))?")


def ranged(description: str, low: float, high: float) -> Any:
    """Describe a number's range in the schema, without enforcing it here."""
    return Field(description=description, json_schema_extra={"minimum": low, "maximum": high})


def in_schema(**schema: Any) -> Any:
    """Add keywords to a field's schema, without enforcing them here."""
    return Field(json_schema_extra=schema)


def listed(description: str, least: int, most: int) -> Any:
    """Describe a list's length in the schema, without enforcing it here."""
    return Field(description=description, json_schema_extra={"minItems": least, "maxItems": most})


Text = Annotated[str, in_schema(minLength=1, maxLength=1024)]
Texts = list[Text]
TokenIds = list[Annotated[int, in_schema(minimum=0, maximum=1 << 30)]]
Bias = dict[str, Annotated[float, in_schema(minimum=-100, maximum=100)]]

_LEAST, _MOST = TEMPERATURE_RANGE
_BIAS: dict[str, Any] = {"maxProperties": 4096, "propertyNames": {"pattern": "^[0-9]{1,9}$"}}


class SharedSamplingFields(Strict):
    """Null means the default for every field. "Extension" marks fields that OpenAI's API does not have."""

    min_tokens: Annotated[
        int | None, ranged("an extension: minimum number of output tokens; default 0", 0, 1 << 30)
    ] = None
    temperature: Annotated[
        float | None,
        ranged(f"default: the model's, or 1; 0 is greedy; other values are at least {_LEAST:g}", 0, _MOST),
    ] = None
    top_p: Annotated[float | None, ranged("default: the model's, or 1: all tokens", *TOP_P_RANGE)] = None
    top_k: Annotated[
        int | None, ranged("an extension; default: the model's, or 0 (or -1): all tokens", -1, 1 << 30)
    ] = None
    min_p: Annotated[float | None, ranged("an extension; default: the model's, or 0: all tokens", 0, 1)] = (
        None
    )
    repetition_penalty: Annotated[
        float | None, ranged("an extension; default: the model's, or 1: no penalty", *REPETITION_RANGE)
    ] = None
    frequency_penalty: Annotated[float | None, ranged("default 0", -2, 2)] = None
    presence_penalty: Annotated[float | None, ranged("default 0", -2, 2)] = None
    logit_bias: Annotated[
        Bias | None, Field(description="by token id: a number added to its logit", json_schema_extra=_BIAS)
    ] = None
    seed: Annotated[
        int | None, ranged("choice i of a prompt uses seed + i; default: random", -(1 << 63), (1 << 63) - 1)
    ] = None
    ignore_eos: Annotated[
        bool | None, Field(description="an extension: continue after an end-of-sequence token")
    ] = None
    stop_token_ids: Annotated[TokenIds | None, listed("an extension: tokens that end the output", 0, 256)] = (
        None
    )
    allowed_token_ids: Annotated[
        TokenIds | None, listed("an extension: only these tokens can be generated", 1, 1 << 22)
    ] = None
    speculative: Annotated[
        Literal["off"] | None,
        Field(description="an extension: draft nothing of this output; drafts change no token"),
    ] = None
    bad_words: Annotated[
        Texts | None,
        listed(f"an extension: texts never generated; at most {MAX_BAD_WORDS} characters in total", 0, 256),
    ] = None

    def most_tokens(self, wanted: int | None, default: int | None, longest: int) -> int:
        """The output limit of a reply: `wanted` or else the model's `default`, where `longest` leaves room.

        If not even one token has room, the limit is one that passes validation: the error is then about the
        prompt's length, which is checked later.
        """
        if wanted is not None:
            return wanted
        least = self.min_tokens or 0
        room = longest if longest > 0 else max(least, 1)
        return min(max(default or room, least), room)

    def given(self) -> dict[str, Any]:
        """The fields that the client has set and that `SamplingParams` has under the same name."""
        given = self.model_fields_set
        return {
            name: value
            for name in _sampling_names(type(self))
            if name in given and (value := getattr(self, name)) is not None
        }


Prompts = str | list[str] | list[int] | list[list[int]]


def singles(prompts: Prompts) -> list[str] | list[list[int]]:
    """The list of prompts, where a client may give one text or one list of token ids instead."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # pyright: ignore[reportReturnType] (all elements are integers)
    return prompts  # pyright: ignore[reportReturnType]


class SchedulingFields(Strict):
    """The fields that concern the scheduler."""

    priority: Annotated[
        int | None,
        ranged(
            "an extension: requests with a lower one go first; default 0, and no other is allowed unless the "
            "server runs with --scheduling-policy priority",
            *PRIORITY_RANGE,
        ),
    ] = None
    cache_salt: Annotated[
        str | None,
        Field(
            description="an extension: a secret; the request reuses only keys and values of requests with "
            "the same one, and of the same API key",
            json_schema_extra={"minLength": 1, "maxLength": MAX_CACHE_SALT},
        ),
    ] = None

    @property
    def scheduling(self) -> SchedulingParams:
        """Priority and cache salt. Raises InvalidSchedulingParameter."""
        if not self.priority and self.cache_salt is None:
            return PLAIN
        return SchedulingParams(priority=self.priority or 0, cache_salt=self.cache_salt)


@cache
def _sampling_names(fields: type[SharedSamplingFields]) -> tuple[str, ...]:
    """The fields that `SamplingParams` has too, but for `max_tokens`, whose default depends on the route."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    return tuple(name for name in names if name in fields.model_fields and name != "max_tokens")


class SamplingFields(SharedSamplingFields):
    """The sampling fields of chat and completions."""

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
    return_routed_experts: Annotated[
        bool | None,
        Field(
            description="an extension, for a mixture of experts: each choice has routed_experts, the experts "
            "of every token but the last; such a request reads no cached keys and values"
        ),
    ] = None
    use_beam_search: Annotated[
        bool | None,
        Field(description="an extension: the choices are the n best of a beam search; not with stream"),
    ] = None
    best_of: Annotated[
        int | None,
        Field(
            description="number of beams of use_beam_search, from n (the default) to 16; without it 1 or n"
        ),
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
        """The request's sampling parameters, with the model's `defaults` and the route's own fields (`more`).

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

    place: ClassVar = "stream_options"

    include_usage: Annotated[bool | None, Field(description="send a final chunk with the usage")] = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="an extension: every chunk has the usage so far")
    ] = None


class GenerationRequest(SamplingFields, SchedulingFields):
    """The fields that chat and completions accept."""

    kv_transfer_params: Annotated[
        dict[str, Any] | None,
        Field(
            description="an extension, as in vLLM: routers set it to let one server compute the prompt and "
            "another the output (docs/separation.md)"
        ),
    ] = None

    model: Annotated[str | None, Field(description="default: the served model")] = None
    stream: Annotated[bool | None, Field(description="respond with server-sent events")] = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, Field(description="written to the access log")] = None
    return_token_ids: Annotated[
        bool | None,
        Field(
            description="an extension, as in vLLM: return token_ids with each choice, and prompt_token_ids; "
            "a stream has the latter in a choice's first chunk"
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        ranged(
            "an extension, as in vLLM: return the log-probabilities of the prompt's tokens, and this many of "
            "the most likely ones",
            0,
            MAX_TOP_LOGPROBS,
        ),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, NotBuilt(False, why="the text would end before it")
    ] = None
    skip_special_tokens: Annotated[bool | None, NotBuilt(True, why="special tokens would have no text")] = (
        None
    )
    spaces_between_special_tokens: Annotated[
        bool | None, NotBuilt(True, why="special tokens have no text")
    ] = None
    truncate_prompt_tokens: Annotated[int | None, NotBuilt(why="the prompt would be whole")] = None

    @property
    def scheduling(self) -> SchedulingParams:
        """As in SchedulingFields, with the transfer of keys and values."""
        params = super().scheduling
        if self.kv_transfer_params is None:
            return params
        transfer = KVTransferParams.read(self.kv_transfer_params)
        if self.n is not None and self.n > 1:  # each output samples its own
            transfer = replace(transfer, samples_first=True)
        return replace(params, kv_transfer=transfer)

    def check_stream_options(self) -> None:
        """Raise InvalidRequest for `stream_options` without `stream`, or for what a stream cannot have."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options are for a stream; set stream to true, or leave them out"
            raise InvalidRequest(message, param="stream_options")
        if self.use_beam_search and self.stream:
            message = "stream and use_beam_search are both given; a beam search has no output before its end"
            raise NotSupported(message, param="stream")
        if self.prompt_logprobs is not None and self.stream:
            message = "stream and prompt_logprobs are both given; leave one out"
            raise NotSupported(message, param="prompt_logprobs")


class RoutedExperts(BaseModel):
    """The experts chosen for each token of prompt and output but the last.

    The array's axes are tokens, layers with experts, and chosen experts.
    """

    data: Annotated[str, Field(description="base64 of the array's little-endian elements")]
    dtype: Literal["uint8", "uint16"]
    shape: list[int]


class PromptTokensDetails(BaseModel):
    """Prompt tokens whose keys and values were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Output tokens that are reasoning or its markers, and the tokens of a prediction."""

    reasoning_tokens: Annotated[
        int | None, Field(description="only for a model whose reasoning format is known")
    ] = None
    accepted_prediction_tokens: Annotated[
        int | None, Field(description="tokens of the prediction that are in the completion")
    ] = None
    rejected_prediction_tokens: Annotated[
        int | None, Field(description="tokens of the prediction that are not in the completion")
    ] = None


class Usage(BaseModel):
    """Token counts. A prompt counts once, however many choices it has. Null fields are left out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class GeneratedChoice(BaseModel):
    """The fields that a choice has in both OpenAI routes."""

    index: int
    finish_reason: FinishReason
    weights_version: Annotated[
        int | None, Field(description="version of the weights in use, on a server that can replace them")
    ] = None
    token_ids: Annotated[
        list[int] | None, Field(description="with return_token_ids: the output's tokens")
    ] = None
    score: Annotated[float | None, Field(description="with use_beam_search")] = None
    routed_experts: Annotated[
        RoutedExperts | None, Field(description="with return_routed_experts; in a stream in the last chunk")
    ] = None


class GeneratedResponse(BaseModel):
    """The fields that a response has in both OpenAI routes."""

    id: str
    created: Annotated[int, Field(description="in seconds since 1970")]
    model: str
    system_fingerprint: str
    usage: Usage
    kv_transfer_params: Annotated[
        dict[str, Any] | None,
        Field(description="for the server that goes on, if the request's had do_remote_decode"),
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

    `check_tools` and `tool_wish` use the names of chat, `tools.0.function.NAME`. Other protocols have
    `tools.0.NAME`; `names` translates a NAME that differs too.
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
