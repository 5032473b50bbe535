"""The request and response of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from orca_jax.errors import InvalidRequest
from orca_jax.request.generation_defaults import GenerationDefaults
from orca_jax.request.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from server.http.fields.both import FinishReason, GenerationRequest, Usage
from server.http.fields.conversation import ConversationFields
from server.http.fields.logprobs import ChatLogprobs
from server.http.fields.not_built import NotBuilt
from server.http.fields.sampling import ranged


class ChatCompletionRequest(GenerationRequest, ConversationFields):
    """POST /v1/chat/completions. Without `max_tokens`, a choice may be as long as the model allows."""

    logprobs: Annotated[bool | None, Field(description="return the tokens' log-probabilities")] = None
    top_logprobs: Annotated[
        int | None,
        ranged("with logprobs: also return this many of the most likely tokens", 0, MAX_TOP_LOGPROBS),
    ] = None

    tool_choice: Annotated[str | dict[str, Any] | None, NotBuilt("none", "auto")] = None
    parallel_tool_calls: Annotated[bool | None, NotBuilt(True, False)] = None
    functions: Annotated[list[Any] | None, NotBuilt([])] = None
    function_call: Annotated[str | dict[str, Any] | None, NotBuilt("none", "auto")] = None
    modalities: Annotated[list[str] | None, NotBuilt(["text"])] = None
    audio: Annotated[dict[str, Any] | None, NotBuilt()] = None
    prediction: Annotated[dict[str, Any] | None, NotBuilt()] = None
    reasoning_effort: Annotated[str | None, NotBuilt("none")] = None
    verbosity: Annotated[str | None, NotBuilt("medium")] = None
    web_search_options: Annotated[dict[str, Any] | None, NotBuilt()] = None
    moderation: Annotated[dict[str, Any] | None, NotBuilt()] = None
    service_tier: Annotated[str | None, NotBuilt("auto", "default")] = None
    store: Annotated[bool | None, NotBuilt(False)] = None
    metadata: Annotated[dict[str, str] | None, NotBuilt({})] = None
    safety_identifier: Annotated[str | None, NotBuilt()] = None
    prompt_cache_key: Annotated[str | None, NotBuilt()] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, NotBuilt()] = None
    prompt_cache_retention: Annotated[str | None, NotBuilt()] = None

    @property
    def client_names(self) -> dict[str, str]:
        """The client's names for fields of `SamplingParams` and for the prompt; see `renamed_fields`."""
        return {**super().client_names, "logprobs": "top_logprobs", "prompt": "messages"}

    def sampling(self, defaults: GenerationDefaults, *, longest: int) -> SamplingParams:
        """The sampling parameters, with the model's `defaults`; a reply may have up to `longest` tokens.

        Raises a subclass of InvalidRequest.
        """
        wanted, n_top = self.wanted_tokens, self.top_logprobs
        if n_top and not self.logprobs:
            message = f"top_logprobs is {n_top} without logprobs; set logprobs to true, or leave it out"
            raise InvalidRequest(message, param="top_logprobs")
        if wanted is None:
            wanted = min(max(defaults.max_tokens or longest, self.min_tokens or 0), longest)
        return self.sampling_params(
            defaults.sampling,
            max_tokens=wanted,
            logprobs=(n_top or 0) if self.logprobs else None,
        )


class AnswerMessage(BaseModel):
    """The model's reply."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One reply."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """The response to POST /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Annotated[int, Field(description="in seconds since 1970")]
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
