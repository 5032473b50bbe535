"""The gain that the costs of iterations promise for drafts, by hand."""

import pytest

from bench.speculation import promised_gain
from orca_jax.config import ServingConfig
from orca_jax.iteration.shape import serving_buckets


def serving(cost_of_a_token: float) -> ServingConfig:
    """Iterations of a fixed time of 1, and so much more for each token of the bucket."""
    sizes = ServingConfig(max_batch_size=8, n_slots=512, max_batch_tokens=64)
    costs = tuple(1 + cost_of_a_token * n for n in serving_buckets(sizes))
    return ServingConfig(max_batch_size=8, n_slots=512, max_batch_tokens=64, iteration_costs=costs)


@pytest.mark.parametrize(
    ("cost_of_a_token", "streams", "right", "n_drafts", "n_input", "gain"),
    [
        (0.0, 1, 1.0, 1, 8, 9 / 5),  # a prompt and 8 decodes; with drafts 4
        (0.0, 2, 0.5, 2, 64, 10 / (2 + 8 / 1.75)),  # two iterations of prompts; 1 + 1/2 + 1/4 tokens
        (0.0, 4, 1.0, 4, 8, 9 / 5),  # room for one draft each
        (1.0, 1, 1.0, 1, 8, (9 + 8 * 2) / (9 + 4 * 9)),  # 2 for a token, 9 for the bucket of up to 8
    ],
)
def test_the_gain_is_that_of_whole_requests(
    cost_of_a_token: float, streams: int, right: float, n_drafts: int, n_input: int, gain: float
) -> None:
    found = promised_gain(serving(cost_of_a_token), streams, right, n_drafts, n_input=n_input, n_output=9)
    assert found == pytest.approx(gain)
