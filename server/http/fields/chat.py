"""The request and response of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from orca_jax.errors import InvalidRequest
from orca_jax.request.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from server.http.fields.both import FinishReason, GenerationRequest, Usage
from server.http.fields.logprobs import ChatLogprobs
from server.http.fields.not_built import NotBuilt
from server.http.fields.sampling import ranged
from server.http.fields.strict import FirstFault, Strict


class ContentPart(Strict):
    """A part of a message's content."""

    type: Annotated[
        Literal["text", "refusal", "image_url", "input_audio", "video_url", "file"], NotBuilt("text")
    ]
    text: str | None = None

    refusal: Annotated[str | None, NotBuilt()] = None
    image_url: Annotated[dict[str, Any] | None, NotBuilt()] = None
    input_audio: Annotated[dict[str, Any] | None, NotBuilt()] = None
    video_url: Annotated[dict[str, Any] | None, NotBuilt()] = None
    file: Annotated[dict[str, Any] | None, NotBuilt()] = None
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, NotBuilt()] = None


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Content = Annotated[
    Annotated[list[ContentPart], FirstFault()],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart]),
]


class ChatMessage(Strict):
    """A message of the conversation."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        NotBuilt("system", "developer", "user", "assistant"),
    ]
    content: Annotated[Content, Field(description="a text, or parts of type text")]
    name: Annotated[str | None, Field(description="passed to the chat template")] = None

    refusal: Annotated[str | None, NotBuilt()] = None
    audio: Annotated[dict[str, Any] | None, NotBuilt()] = None
    annotations: Annotated[list[Any] | None, NotBuilt([])] = None
    tool_calls: Annotated[list[Any] | None, NotBuilt([])] = None
    tool_call_id: Annotated[str | None, NotBuilt()] = None
    function_call: Annotated[dict[str, Any] | None, NotBuilt()] = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions. Without `max_tokens`, a choice may be as long as the model allows."""

    messages: Annotated[list[ChatMessage], FirstFault(), Field(min_length=1)]
    logprobs: Annotated[bool | None, Field(description="return the tokens' log-probabilities")] = None
    top_logprobs: Annotated[
        int | None,
        ranged("with logprobs: also return this many of the most likely tokens", 0, MAX_TOP_LOGPROBS),
    ] = None

    tools: Annotated[list[Any] | None, NotBuilt([])] = None
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
    add_generation_prompt: Annotated[bool | None, NotBuilt(True)] = None
    continue_final_message: Annotated[bool | None, NotBuilt(False)] = None
    add_special_tokens: Annotated[bool | None, NotBuilt(False)] = None
    chat_template: Annotated[str | None, NotBuilt()] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, NotBuilt({})] = None
    documents: Annotated[list[Any] | None, NotBuilt([])] = None

    @property
    def client_names(self) -> dict[str, str]:
        """The client's names for fields of `SamplingParams` and for the prompt; see `renamed_fields`."""
        return {**super().client_names, "logprobs": "top_logprobs", "prompt": "messages"}

    def sampling(self, *, longest: int) -> SamplingParams:
        """The sampling parameters. `longest` is the default for `max_tokens`.

        Raises a subclass of InvalidRequest.
        """
        wanted, n_top = self.wanted_tokens, self.top_logprobs
        if n_top and not self.logprobs:
            message = f"top_logprobs is {n_top} without logprobs; set logprobs to true, or leave it out"
            raise InvalidRequest(message, param="top_logprobs")
        return self.sampling_params(
            max_tokens=longest if wanted is None else wanted,
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
