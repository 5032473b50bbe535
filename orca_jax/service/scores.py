"""Log-probabilities of given tokens, as `LLM.score` returns them.

The tokens become a prompt and a scored output, which run in the same batches as other requests. Their
log-probabilities are computed as those of any prompt and any output.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from orca_jax.errors import (
    InvalidPrompt,
    InvalidRequest,
    InvalidSamplingParameter,
    NotSupported,
    RequestCancelled,
)
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.prompts import prompt_token_ids
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import PLAIN, SchedulingParams
from orca_jax.scheduling.admission import CheckedPrompt, TokenName, check_in_vocabulary
from orca_jax.service.generation import GenerationResult
from orca_jax.service.intake import Intake
from orca_jax.service.orca import Orca
from orca_jax.service.prepared_params import OutputRules


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A checked prompt with the tokens that follow it. Without any, one token is sampled and ignored."""

    prompt: CheckedPrompt
    rules: OutputRules


def score_request(
    service: Intake,
    token_ids: Sequence[int],
    n_prompt: int | None = None,
    scheduling: SchedulingParams = PLAIN,
    *,
    tenant: str = "",
) -> ScoreRequest:
    """Check a request for the log-probabilities of given tokens; see `LLM.score`.

    Raises a leaf of InvalidRequest.
    """
    check_scored(token_ids, n_prompt, service.model, service.token_name)
    n_first = split_scored(len(token_ids), n_prompt, deterministic=service.serving.deterministic)
    rules = service.rules(scoring(len(token_ids) - n_first))
    checked = service.check(token_ids[:n_first], rules, scheduling, tenant=tenant)
    return ScoreRequest(replace(checked, scored_ids=tuple(token_ids[n_first:])), rules)


def check_scored(
    token_ids: Sequence[int], n_prompt: object, model: ModelConfig, token_name: TokenName
) -> None:
    """Raises NotSupported, EmptyPrompt, TokenOutOfRange, or InvalidSamplingParameter for `n_prompt`."""
    if model.encoder is not None:
        raise NotSupported("scores are not supported for a model with an encoder", param="prompt")
    check_in_vocabulary(token_ids, model, token_name)
    if n_prompt is None:
        return
    n = len(token_ids)
    if isinstance(n_prompt, bool) or not isinstance(n_prompt, int | np.integer) or not 1 <= n_prompt <= n:
        message = f"n_prompt is {n_prompt!r}; it must be from 1 to the number of tokens, which is {n}"
        raise InvalidSamplingParameter(message, param="n_prompt")


def split_scored(n_tokens: int, n_prompt: int | None, *, deterministic: bool) -> int:
    """The number of tokens that run as the prompt.

    A prompt of all tokens but the last takes the fewest iterations. A deterministic engine computes prompts
    and outputs in different shapes, so their bits differ; it keeps the prompt as it was at generation.
    """
    if deterministic:
        return n_tokens if n_prompt is None else n_prompt
    return max(1, n_tokens - 1)


def scoring(n_output: int) -> SamplingParams:
    """The parameters of a request that scores `n_output` output tokens."""
    return SamplingParams(
        max_tokens=max(1, n_output), temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )


def listed_token_ids(model: str, number: int, token_ids: object) -> list[int]:
    """Check the token ids of list `number`. Raises InvalidPrompt."""
    try:
        if isinstance(token_ids, str):
            raise InvalidPrompt("a text cannot be scored; encode it first", param="token_id_lists")
        return prompt_token_ids(model, None, token_ids)
    except InvalidRequest as error:
        raise _of_list(number, error) from error


def scores(
    service: Orca,
    lists: Sequence[Sequence[int]],
    n_prompt: int | Sequence[int] | npt.NDArray[np.integer] | None,
    scheduling: SchedulingParams,
) -> list[list[float]]:
    """Submit all lists and wait for them; see `LLM.score`. Checks everything before running anything.

    Raises a leaf of InvalidRequest, EngineError, and RequestCancelled if the service is closed meanwhile.
    """
    each_n: list[int | None]
    if n_prompt is None or isinstance(n_prompt, int):
        each_n = [n_prompt] * len(lists)
    elif isinstance(n_prompt, np.integer):
        each_n = [int(n_prompt)] * len(lists)
    else:
        each_n = list(n_prompt)
    if len(each_n) != len(lists):
        message = f"there are {len(each_n)} n_prompt for {len(lists)} lists; give one, or one for each"
        raise InvalidSamplingParameter(message, param="n_prompt")
    checked: list[ScoreRequest] = []
    for i, (token_ids, n) in enumerate(zip(lists, each_n, strict=True)):
        try:
            checked.append(score_request(service, token_ids, n, scheduling))
        except InvalidRequest as error:
            raise _of_list(i, error) from error
    with ExitStack() as running:
        generations = [running.enter_context(service.submit(one.prompt, one.rules)) for one in checked]
        results = [generation.result() for generation in generations]
    return [after_the_first(result, one) for result, one in zip(results, checked, strict=True)]


def after_the_first(result: GenerationResult, request: ScoreRequest) -> list[float]:
    """The log-probability of each token after the first. Raises RequestCancelled for an early end."""
    if result.finish_reason is not FinishReason.LENGTH:
        raise RequestCancelled(f"the request for log-probabilities ended early: {result.finish_reason}")
    assert result.prompt_logprobs is not None and result.logprobs is not None
    output = result.logprobs[: len(request.prompt.scored_ids)]
    return [token.logprob for token in (*result.prompt_logprobs, *output)]


def _of_list(number: int, error: InvalidRequest) -> InvalidRequest:
    return type(error)(f"list {number}: {error}", param=error.param)
