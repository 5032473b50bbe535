"""Random models: the tokens that the engine gives some random requests are the reference's."""

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings

from orca_jax.config import ServingConfig
from orca_jax.families.config_json import config_from_json, config_to_json, plain_error
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.request import Request
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import greedy_request, harness
from tests.device.model.drawn_weights import drawn

VOCABULARY, N_POSITIONS = 53, 40
SERVING = ServingConfig(max_batch_size=4, n_slots=4 * 48, max_batch_tokens=48)

any_model: Any = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def requests(seed: int = 1, n: int = 6) -> tuple[list[Request], list[int]]:
    """Requests of 1 to 35 tokens, and their arrivals."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCABULARY, rng.integers(1, N_POSITIONS - 4)).tolist() for _ in range(n)]
    made = [greedy_request(str(i), prompt, 4) for i, prompt in enumerate(prompts)]
    return made, sorted(rng.integers(0, 8, n).tolist())


def check(model: ModelConfig, seed: int) -> None:
    """Check a model with this vocabulary and number of positions."""
    assert config_from_json(config_to_json(model), plain_error) == model
    parameters = drawn(model, seed)
    asked, arrivals = requests(seed)
    harness(model, parameters, SERVING, buckets=(4, 48)).run(asked, arrivals)
    reference = GreedyReference(model, parameters)
    assert sum(reference.sure(request) for request in asked) > 0
