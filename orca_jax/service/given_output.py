"""A request for the log-probabilities of given tokens: its output is given, not sampled.

It runs as any other request, in the same batches. The log-probabilities of its prompt are computed as those
of any prompt, those of its output as those of any output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orca_jax.errors import InvalidSamplingParameter, NotSupported
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import PLAIN, SchedulingParams
from orca_jax.scheduling.admission import CheckedPrompt, check_in_vocabulary
from orca_jax.service.orca import Orca
from orca_jax.service.prepared_params import OutputRules


@dataclass(frozen=True, slots=True)
class GivenOutput:
    """A checked prompt with the tokens that follow it. If there are none, one is sampled for nothing."""

    prompt: CheckedPrompt
    rules: OutputRules


def given_output(
    service: Orca,
    token_ids: Sequence[int],
    n_prompt: int | None = None,
    scheduling: SchedulingParams = PLAIN,
    *,
    tenant: str = "",
) -> GivenOutput:
    """Check a request for the log-probabilities of given tokens; see `LLM.score`.

    Raises a leaf of InvalidRequest.
    """
    check_given(token_ids, n_prompt, service.model)
    n_first = split_given(len(token_ids), n_prompt, deterministic=service.scheduler.config.deterministic)
    rules = service.rules(scoring(len(token_ids) - n_first))
    checked = service.check(token_ids[:n_first], rules, scheduling, tenant=tenant)
    return GivenOutput(replace(checked, given_ids=tuple(token_ids[n_first:])), rules)


def check_given(token_ids: Sequence[int], n_prompt: object, model: ModelConfig) -> None:
    """Raises NotSupported, EmptyPrompt, TokenOutOfRange, or InvalidSamplingParameter for `n_prompt`."""
    if model.encoder is not None:
        raise NotSupported("scores are not supported for a model with an encoder", param="prompt")
    check_in_vocabulary(token_ids, model)
    if n_prompt is None:
        return
    n = len(token_ids)
    if isinstance(n_prompt, bool) or not isinstance(n_prompt, int | np.integer) or not 1 <= n_prompt <= n:
        message = f"n_prompt is {n_prompt!r}; it must be from 1 to the number of tokens, which is {n}"
        raise InvalidSamplingParameter(message, param="n_prompt")


def split_given(n_tokens: int, n_prompt: int | None, *, deterministic: bool) -> int:
    """How many of the tokens run as the prompt.

    All but the last takes the fewest iterations. A deterministic engine computes a prompt and an output in
    different shapes, so their bits differ; there the prompt is what it was when the output was generated.
    """
    if deterministic:
        return n_tokens if n_prompt is None else n_prompt
    return max(1, n_tokens - 1)


def scoring(n_given: int) -> SamplingParams:
    """The parameters of a request of which `n_given` output tokens are given."""
    return SamplingParams(
        max_tokens=max(1, n_given), temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
