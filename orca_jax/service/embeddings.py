"""Requests for embeddings: a vector for each prompt, as `LLM.embed` returns it."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from orca_jax.errors import InvalidRequest, NotSupported, RequestCancelled, ServiceClosed
from orca_jax.request.pooled_vector import Vector, embedding
from orca_jax.request.pooling import Pooling, check_dimensions, checked_pooling
from orca_jax.request.prompts import CheckedPrompt, listed_prompts, prompt_token_ids
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import PLAIN, SchedulingParams
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.service.generation import Generation
from orca_jax.service.orca import Orca
from orca_jax.service.prepared_params import OutputRules

# It ends with its first token, which is sampled for nothing.
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def pooled_prompt(
    service: Orca,
    token_ids: Sequence[int],
    pooling: object,
    scheduling: SchedulingParams = PLAIN,
    *,
    tenant: str = "",
) -> tuple[CheckedPrompt, OutputRules]:
    """Check a request for an embedding; see `LLM.embed`. Raises a leaf of InvalidRequest."""
    if service.model.encoder is not None:
        raise NotSupported("embeddings are not supported for a model with an encoder", param="prompt")
    checked_pool = checked_pooling(pooling)
    rules = service.rules(_ONE_TOKEN)
    return replace(service.check(token_ids, rules, scheduling, tenant=tenant), pooling=checked_pool), rules


class Embedding:
    """What an LLM makes embeddings with."""

    name: str
    tokenizer: Tokenizer | None

    @property
    def service(self) -> Orca:
        raise ServiceClosed("there is no service")

    def embed(
        self,
        prompts: str | Sequence[int] | np.ndarray | Sequence[Any],
        *,
        pooling: Pooling = "last",
        dimensions: int | None = None,
        normalize: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Vector]:
        """A vector for each prompt (one or a list, as in `generate`), from its final hidden states.

        These are what the model's head reads, after the final norm; of a model of one's own, what its last
        layer leaves. `pooling` "last" takes the last token's, "mean" the mean over all tokens. A vector is
        cut to its first `dimensions` numbers, by default all, and then has length 1 unless `normalize` is
        False. Requests for them run in the same batches as all others.

        Checks everything before running anything; raises a subclass of InvalidRequest that names the prompt.
        Raises EngineError if the engine fails, and ServiceClosed after `close`.
        """
        service = self.service
        check_dimensions(dimensions, service.model.embedding.size)
        scheduling = SchedulingParams(priority=priority, cache_salt=cache_salt)
        checked: list[tuple[CheckedPrompt, OutputRules]] = []
        for i, prompt in enumerate(listed_prompts(prompts)):
            try:
                token_ids = prompt_token_ids(self.name, self.tokenizer, prompt)
                checked.append(pooled_prompt(service, token_ids, pooling, scheduling))
            except InvalidRequest as error:
                raise type(error)(f"prompt {i}: {error}", param=error.param) from error
        with ExitStack() as running:
            generations = [running.enter_context(service.submit(*one)) for one in checked]
            vectors = [_pooled(generation) for generation in generations]
        return [embedding(vector, dimensions=dimensions, normalize=normalize) for vector in vectors]


def _pooled(generation: Generation) -> Vector:
    reason = generation.result().finish_reason
    if reason is not FinishReason.LENGTH or generation.pooled is None:
        raise RequestCancelled(f"the request for an embedding ended early: {reason}")
    return generation.pooled
