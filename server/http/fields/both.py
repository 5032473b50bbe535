"""The request and response fields that chat and completions share, by OpenAI's names and strictly typed."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from orca_jax.errors import InvalidRequest
from server.http.fields.not_built import NotBuilt
from server.http.fields.sampling import SamplingFields
from server.http.fields.strict import Strict

FinishReason = Literal["stop", "length"]


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: Annotated[bool | None, Field(description="send a final chunk with the usage")] = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="an extension: every chunk has the usage so far")
    ] = None
    include_obfuscation: Annotated[bool | None, NotBuilt(False)] = None


class GenerationRequest(SamplingFields):
    """The fields that both routes accept."""

    model: Annotated[str | None, Field(description="default: the served model")] = None
    stream: Annotated[bool | None, Field(description="respond with server-sent events")] = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, Field(description="written to the access log")] = None

    prompt_logprobs: Annotated[int | None, NotBuilt(instead="use echo with logprobs (/v1/completions)")] = (
        None
    )
    length_penalty: Annotated[float | None, NotBuilt(1.0)] = None
    use_beam_search: Annotated[bool | None, NotBuilt(False)] = None
    include_stop_str_in_output: Annotated[bool | None, NotBuilt(False)] = None
    skip_special_tokens: Annotated[bool | None, NotBuilt(True)] = None
    spaces_between_special_tokens: Annotated[bool | None, NotBuilt(True)] = None
    truncate_prompt_tokens: Annotated[int | None, NotBuilt()] = None
    return_token_ids: Annotated[bool | None, NotBuilt(False)] = None
    priority: Annotated[int | None, NotBuilt(0)] = None

    def check_stream_options(self) -> None:
        """Raise InvalidRequest for `stream_options` without `stream`."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options are for a stream; set stream to true, or leave them out"
            raise InvalidRequest(message, param="stream_options")


class Usage(BaseModel):
    """Token counts. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
