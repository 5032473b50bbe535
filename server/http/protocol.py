"""What both generating routes take and give: OpenAI's field names, strict types, and no field unread.

Ranges of sampling parameters stand in the schema for its readers; `SamplingParams` alone enforces them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from orca_jax.errors import InvalidRequest
from orca_jax.request import SamplingParams
from server.http.not_built import NotBuilt

FinishReason = Literal["stop", "length"]


class FirstFault(FailFast):
    """A list is read up to its first fault: a client may send millions."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] (a union needs it)
        return 0


class Strict(BaseModel):
    """No field that is not known, no value of another type, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: Annotated[bool | None, Field(description="a last chunk with the usage")] = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="an extension: every chunk has the usage so far")
    ] = None
    include_obfuscation: Annotated[bool | None, NotBuilt(False)] = None


def _ranged(description: str, low: float, high: float, *, above_low: bool = False) -> Any:
    bounds: dict[str, Any] = {"exclusiveMinimum" if above_low else "minimum": low, "maximum": high}
    return Field(description=description, json_schema_extra=bounds)


class GenerationRequest(Strict):
    """The fields that both routes know. Null is the default everywhere."""

    model: Annotated[str | None, Field(description="default: the model that is served")] = None
    n: Annotated[int | None, Field(description="choices for each prompt; default 1", ge=1, le=1 << 16)] = None
    temperature: Annotated[float | None, _ranged("default 1; 0 is greedy", 0, 100)] = None
    top_p: Annotated[float | None, _ranged("default 1: every token", 0, 1, above_low=True)] = None
    top_k: Annotated[int | None, _ranged("an extension; default 0: every token", 0, 1 << 30)] = None
    seed: Annotated[
        int | None,
        _ranged("choice i of a prompt uses seed + i; default: drawn", -(1 << 63), (1 << 63) - 1),
    ] = None
    stop: Annotated[
        str | Annotated[list[str], FirstFault()] | None,
        Field(description="up to 16 texts of 1 to 1024 characters; the output ends before the first of them"),
    ] = None
    ignore_eos: Annotated[bool | None, Field(description="an extension: go on after the text's end")] = None
    stream: Annotated[bool | None, Field(description="answer with server-sent events")] = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, Field(description="goes into the access log")] = None
    max_tokens: Annotated[int | None, _ranged("output tokens at most", 1, 1 << 30)] = None
    max_completion_tokens: Annotated[int | None, _ranged("another name of max_tokens", 1, 1 << 30)] = None

    presence_penalty: Annotated[float | None, NotBuilt(0.0)] = None
    frequency_penalty: Annotated[float | None, NotBuilt(0.0)] = None
    repetition_penalty: Annotated[float | None, NotBuilt(1.0)] = None
    length_penalty: Annotated[float | None, NotBuilt(1.0)] = None
    min_p: Annotated[float | None, NotBuilt(0.0)] = None
    min_tokens: Annotated[int | None, NotBuilt(0)] = None
    logit_bias: Annotated[dict[str, float] | None, NotBuilt({})] = None
    response_format: Annotated[dict[str, Any] | None, NotBuilt({"type": "text"})] = None
    use_beam_search: Annotated[bool | None, NotBuilt(False)] = None
    stop_token_ids: Annotated[list[int] | None, NotBuilt([])] = None
    include_stop_str_in_output: Annotated[bool | None, NotBuilt(False)] = None
    skip_special_tokens: Annotated[bool | None, NotBuilt(True)] = None
    spaces_between_special_tokens: Annotated[bool | None, NotBuilt(True)] = None
    bad_words: Annotated[list[str] | None, NotBuilt([])] = None
    allowed_token_ids: Annotated[list[int] | None, NotBuilt()] = None
    truncate_prompt_tokens: Annotated[int | None, NotBuilt()] = None
    prompt_logprobs: Annotated[int | None, NotBuilt()] = None
    return_token_ids: Annotated[bool | None, NotBuilt(False)] = None
    priority: Annotated[int | None, NotBuilt(0)] = None

    @property
    def n_choices(self) -> int:
        """Choices for each prompt."""
        return self.n or 1

    @property
    def max_tokens_field(self) -> str:
        """The name under which the client gave `max_tokens`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def wanted_tokens(self) -> int | None:
        """`max_tokens` under either name. Raises InvalidRequest if they contradict each other."""
        one, other = self.max_tokens, self.max_completion_tokens
        if one is not None and other is not None and one != other:
            message = f"max_tokens is {one} and max_completion_tokens is {other}; give one of them"
            raise InvalidRequest(message, param="max_completion_tokens")
        return one if other is None else other

    def check_stream_options(self) -> None:
        """Raise InvalidRequest for `stream_options` without `stream`."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options are for a stream; set stream to true, or leave them out"
            raise InvalidRequest(message, param="stream_options")

    def sampling(self, *, max_tokens: int) -> SamplingParams:
        """The request's sampling parameters. Raises InvalidSamplingParameter, which names the field."""
        given = {
            name: value
            for name in ("temperature", "top_p", "top_k", "seed", "ignore_eos", "stop")
            if (value := getattr(self, name)) is not None
        }
        with named(max_tokens=self.max_tokens_field):
            return SamplingParams(max_tokens=max_tokens, **given)


@contextmanager
def named(**names: str) -> Iterator[None]:
    """Give an InvalidRequest the client's name of a field: `named(prompt="messages")`."""
    try:
        yield
    except InvalidRequest as error:
        name = names.get(error.param)
        if name is None or name == error.param:
            raise
        message = str(error)
        if message.startswith(f"{error.param} "):
            message = name + message.removeprefix(error.param)
        raise type(error)(message, param=name) from error


class Usage(BaseModel):
    """Token counts: a prompt's once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
