"""The log-probabilities of many lists of given tokens, as `LLM.score` returns them."""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from orca_jax.errors import InvalidPrompt, InvalidRequest, InvalidSamplingParameter, RequestCancelled
from orca_jax.request.prompts import prompt_token_ids
from orca_jax.request.request import FinishReason
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.service.generation import GenerationResult
from orca_jax.service.given_output import GivenOutput, given_output
from orca_jax.service.orca import Orca


def listed_token_ids(model: str, number: int, token_ids: object) -> list[int]:
    """The token ids of list `number`. Raises InvalidPrompt."""
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
    checked: list[GivenOutput] = []
    for i, (token_ids, n) in enumerate(zip(lists, each_n, strict=True)):
        try:
            checked.append(given_output(service, token_ids, n, scheduling))
        except InvalidRequest as error:
            raise _of_list(i, error) from error
    with ExitStack() as running:
        generations = [running.enter_context(service.submit(given.prompt, given.rules)) for given in checked]
        results = [generation.result() for generation in generations]
    return [after_the_first(result, given) for result, given in zip(results, checked, strict=True)]


def after_the_first(result: GenerationResult, given: GivenOutput) -> list[float]:
    """The log-probability of each token after the first."""
    if result.finish_reason is not FinishReason.LENGTH:
        raise RequestCancelled(f"the request for log-probabilities ended early: {result.finish_reason}")
    assert result.prompt_logprobs is not None and result.logprobs is not None
    output = result.logprobs[: len(given.prompt.given_ids)]
    return [token.logprob for token in (*result.prompt_logprobs, *output)]


def _of_list(number: int, error: InvalidRequest) -> InvalidRequest:
    return type(error)(f"list {number}: {error}", param=error.param)
