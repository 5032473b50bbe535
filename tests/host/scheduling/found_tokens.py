"""Requests for tests of the prefix cache and its tiers: how many tokens of a prompt each one finds."""

from collections.abc import Sequence

from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.simulation.simulation import Simulation


def asked(prompt: Sequence[int], n_output: int = 1, salt: tuple[str, ...] = ()) -> Request:
    sampling = SamplingParams(max_tokens=n_output)
    return Request("", tuple(prompt), len(prompt) + n_output, sampling, seed=1, cache_salt=salt)


def run(on: Simulation, *requests: Request) -> list[int]:
    """Run requests that arrive together; returns how many tokens each found."""
    for i, request in enumerate(requests):
        request.request_id = str(i)
        on.pool.add(request)
    on.run()
    return [request.n_cached for request in requests]
