"""The request and response of POST /v1/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from orca_jax.errors import InvalidSamplingParameter
from orca_jax.request.generation_defaults import GenerationDefaults
from orca_jax.request.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from server.http.fields.both import FinishReason, GenerationRequest, Usage
from server.http.fields.logprobs import CompletionLogprobs
from server.http.fields.not_built import NotBuilt
from server.http.fields.sampling import ranged
from server.http.fields.strict import FirstFault

_DEFAULT_MAX_TOKENS = 16  # OpenAI's

TokenIds = Annotated[list[int], FirstFault()]
Prompt = str | Annotated[list[str], FirstFault()] | TokenIds | Annotated[list[TokenIds], FirstFault()]


def _none_for_false(value: Any) -> Any:
    return None if value is False else value


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. Choices are in the order of the prompts, `n` for each."""

    prompt: Annotated[Prompt, Field(description="a text, texts, token ids, or lists of token ids")]
    max_tokens: Annotated[
        int | None, ranged("maximum number of output tokens; default 16; with echo also 0", 0, 1 << 30)
    ] = None
    max_completion_tokens: Annotated[int | None, ranged("an alias of max_tokens", 0, 1 << 30)] = None
    echo: Annotated[bool | None, Field(description="return the prompt before the output")] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="an extension: tokenize texts with special tokens; default true")
    ] = None
    logprobs: Annotated[
        int | None,
        BeforeValidator(_none_for_false, json_schema_input_type=int | Literal[False] | None),
        ranged(
            "return log-probabilities of the tokens and of this many of the most likely ones; default: none",
            0,
            MAX_TOP_LOGPROBS,
        ),
    ] = None

    best_of: Annotated[int | None, NotBuilt(1, same_as="n")] = None
    suffix: Annotated[str | None, NotBuilt()] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list of texts or of token id lists; empty if the client gave an empty list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType] (all elements are integers)
        return self.prompt  # pyright: ignore[reportReturnType]

    @property
    def only_prompt(self) -> bool:
        """Whether to generate nothing and only return, and perhaps score, the prompt."""
        return bool(self.echo) and self.wanted_tokens == 0

    def sampling(self, defaults: GenerationDefaults) -> SamplingParams:
        """The sampling parameters, with the model's `defaults`. Raises a subclass of InvalidRequest.

        If nothing is to be generated they still ask for one token, because scoring a prompt takes an
        iteration.
        """
        wanted = self.wanted_tokens
        if self.only_prompt:
            if self.min_tokens:
                message = f"min_tokens is {self.min_tokens}; it must be at most max_tokens, which is 0"
                raise InvalidSamplingParameter(message, param="min_tokens")
            wanted = 1
        return self.sampling_params(
            defaults.sampling,
            max_tokens=_DEFAULT_MAX_TOKENS if wanted is None else wanted,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class CompletionChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason


class Completion(BaseModel):
    """The response to POST /v1/completions without `stream`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: Annotated[int, Field(description="in seconds since 1970")]
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
