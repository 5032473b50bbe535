"""Requests for embeddings: a vector for each prompt, as `LLM.embed` returns it."""

from collections.abc import Sequence
from contextlib import ExitStack

from orca_jax.errors import RequestCancelled
from orca_jax.request.pooled_vector import Vector
from orca_jax.request.pooling import checked_pooling
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import PLAIN, SchedulingParams
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.intake import Intake
from orca_jax.service.orca import Orca
from orca_jax.service.prepared_params import OutputRules

# The one sampled token is ignored; it ends the request.
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def pooled_prompt(
    service: Intake,
    token_ids: Sequence[int],
    pooling: object,
    scheduling: SchedulingParams = PLAIN,
    *,
    tenant: str = "",
) -> tuple[CheckedPrompt, OutputRules]:
    """Check a request for an embedding; see `LLM.embed`. Without `pooling` it is the service's.

    Raises a leaf of InvalidRequest.
    """
    checked_pool = service.pooling if pooling is None else checked_pooling(pooling)
    rules = service.rules(_ONE_TOKEN)
    return service.check(token_ids, rules, scheduling, tenant=tenant, pooling=checked_pool), rules


def pooled_vectors(service: Orca, checked: Sequence[tuple[CheckedPrompt, OutputRules]]) -> list[Vector]:
    """Run these requests, and return their vectors. Raises EngineError, and RequestCancelled."""
    with ExitStack() as running:
        generations = [running.enter_context(service.submit(*one)) for one in checked]
        vectors: list[Vector] = []
        for generation in generations:
            reason, vector = generation.result().finish_reason, generation.pooled
            if reason is not FinishReason.LENGTH or vector is None:
                raise RequestCancelled(f"the request for an embedding ended early: {reason}")
            vectors.append(vector)
        return vectors
