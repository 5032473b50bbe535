"""`POST /v1/completions`: the model continues a prompt."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import BeforeValidator, Field

from orca_jax.errors import InvalidRequest, InvalidSamplingParameter, NotSupported
from orca_jax.request.generation_defaults import GenerationDefaults
from orca_jax.request.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from orca_jax.scheduling.admission import CheckedPrompt
from server.gateway.served_model import ServedModel
from server.gateway.side_threads import run_for_request
from server.http.bodies.json_body import JsonRoute
from server.http.fields.generation import (
    GeneratedChoice,
    GeneratedResponse,
    GenerationRequest,
    Prompts,
    ranged,
    renamed_fields,
    singles,
)
from server.http.fields.logprobs import CompletionLogprobs, PromptLogprobs, TokenNames, completion_logprobs
from server.http.fields.strict import NotBuilt
from server.http.generation.answer import (
    GENERATION_ERRORS,
    answer,
    check,
    check_number,
    each,
    new_response_id,
)
from server.http.generation.choices import Choices, OutputExtras
from server.http.generation.chunks import TEXT_FORM
from server.http.state import CallOf

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


def _number_for_bool(value: Any) -> Any:
    """Read a chat's `logprobs` as vLLM does here: true is 1; false is none."""
    return {True: 1, False: None}[value] if isinstance(value, bool) else value


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. Choices are in the order of the prompts, `n` for each."""

    prompt: Annotated[Prompts, Field(description="a text, texts, token ids, or lists of token ids")]
    max_tokens: Annotated[
        int | None, ranged("maximum number of output tokens; default 16; with echo also 0", 0, 1 << 30)
    ] = None
    max_completion_tokens: Annotated[int | None, ranged("an alias of max_tokens", 0, 1 << 30)] = None
    decoder_prompt: Annotated[
        str | list[int] | None,
        Field(
            description="for an encoder-decoder, whose encoder reads `prompt`: the beginning of the output"
        ),
    ] = None
    echo: Annotated[bool | None, Field(description="return the prompt before the output")] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="an extension: tokenize texts with special tokens; default true")
    ] = None
    logprobs: Annotated[
        int | None,
        BeforeValidator(_number_for_bool, json_schema_input_type=int | bool | None),
        ranged(
            "return log-probabilities of the tokens and of this many of the most likely ones; default: none",
            0,
            MAX_TOP_LOGPROBS,
        ),
    ] = None

    suffix: Annotated[str | None, NotBuilt(why="the output would not lead up to it")] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts; empty if the client gave an empty list."""
        return singles(self.prompt)

    @property
    def only_prompt(self) -> bool:
        """Whether to generate nothing, and only echo the prompt, perhaps with log-probabilities."""
        return bool(self.echo) and self.wanted_tokens == 0

    def sampling(self, defaults: GenerationDefaults) -> SamplingParams:
        """The sampling parameters, with the model's `defaults`. Raises a subclass of InvalidRequest.

        With `only_prompt` the limit is one token, because scoring a prompt takes an iteration.
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
            prompt_logprobs=self._of_prompt,
        )

    @property
    def _of_prompt(self) -> int | None:
        """How many likely tokens to return for each prompt token; None for no log-probabilities of it."""
        echoed = self.logprobs if self.echo else None
        if echoed is None or self.prompt_logprobs is None:
            return self.prompt_logprobs if echoed is None else echoed
        if echoed != self.prompt_logprobs:
            message = (
                f"prompt_logprobs is {self.prompt_logprobs}, and with echo logprobs is {echoed}; "
                "give both the same number, or leave one out"
            )
            raise InvalidRequest(message, param="prompt_logprobs")
        return echoed


class CompletionChoice(GeneratedChoice):
    """One completion."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: Annotated[list[int] | None, Field(description="with return_token_ids")] = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(GeneratedResponse):
    """The response to POST /v1/completions without `stream`."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post(
    "/v1/completions",
    response_class=Response,
    responses={200: {"model": Completion, "content": {"text/event-stream": {}}}, **GENERATION_ERRORS},
)
async def create_completion(body: CompletionRequest, call: CallOf) -> Response:
    """Continue one or more prompts, in one response or, with `stream`, as server-sent events."""
    body.check_stream_options()
    model = call.accept(body.scheduling, model=body.model, user=body.user)
    n_bytes = call.n_bytes

    def read() -> tuple[SamplingParams, list[list[int]], list[int] | None]:
        sampling = body.sampling(model.defaults)
        check_number(len(body.prompts), body.n_choices, call.options, model)
        if body.echo and model.has_encoder:
            message = (
                "echo is not supported for a model with an encoder: the output does not continue the prompt"
            )
            raise NotSupported(message, param="echo")
        decoder = body.decoder_prompt
        if isinstance(decoder, str):
            decoder = model.encode(decoder, param="decoder_prompt", add_special_tokens=False)
        prompts = each(body.prompts, lambda text: model.encode(text) if isinstance(text, str) else text)
        return sampling, prompts, decoder

    def check_prompts() -> tuple[list[CheckedPrompt], list[str] | None]:
        checked = check(model, prompts, rules, body.scheduling, call.tenant, decoder_ids)
        model.check_routed(checked, sampling)
        return checked, [_text(model, prompt) for prompt in body.prompts] if body.echo else None

    with renamed_fields(**body.client_names):
        sampling, prompts, decoder_ids = await run_for_request(n_bytes, read)
        rules = await call.gateway.compiler.rules(model, sampling)
        checked, prompt_texts = await run_for_request(n_bytes, check_prompts)
    extras = None
    if (
        body.echo
        or body.logprobs is not None
        or body.prompt_logprobs is not None
        or body.return_routed_experts
        or body.return_token_ids
    ):
        extras = OutputExtras(
            names=TokenNames(model.tokenizer),
            write_logprobs=None if body.logprobs is None else completion_logprobs,
            prompts=prompt_texts,
            only_prompts=body.only_prompt,
            token_ids=bool(body.return_token_ids),
            prompt_logprobs=body.prompt_logprobs is not None,
        )
    response_id = new_response_id("cmpl")
    choices = Choices(call, checked, rules, extras=extras, response_id=response_id)
    return await answer(body, model, choices, call.receive, TEXT_FORM)


def _text(model: ServedModel, prompt: str | list[int]) -> str:
    """The prompt's text; empty for token ids if the model has no tokenizer."""
    if isinstance(prompt, str):
        return prompt
    return "" if model.tokenizer is None else model.tokenizer.decode(prompt)
