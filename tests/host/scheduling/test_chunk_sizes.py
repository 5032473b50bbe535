"""The sizes of the chunks into which the serving policy cuts a prompt, worked by hand."""

import pytest

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.iteration.shape import serving_buckets
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.simulation.simulation import Simulation


def request(name: str, n_input: int, n_output: int) -> Request:
    sampling = SamplingParams(max_tokens=n_output)
    return Request(name, tuple(range(n_input)), n_input + n_output, sampling, seed=0)


@pytest.mark.parametrize(
    ("n_decodes", "prefill_tokens", "coarse", "chunks"),
    [
        # Buckets of steps of 8, then 16: 3 decodes and 40 tokens are 43, and 40 is a bucket.
        (3, 40, False, [37, 37, 26]),
        (3, 8, False, [5] * 20),
        # A bucket of one row or none more than the decodes leaves too little: the iteration is padded.
        (7, 2, False, [2] * 50),
        (8, 7, False, [7] * 14 + [2]),
        # Coarse buckets: 8, 16, 32, 48, 64. The last chunk has what is left.
        (3, 40, True, [29, 29, 29, 13]),
        (3, 46, True, [45, 45, 10]),
    ],
)
def test_a_chunk_ends_at_a_bucket_if_that_is_more_than_half(
    n_decodes: int, prefill_tokens: int, coarse: bool, chunks: list[int]
) -> None:
    scheduling = SchedulingConfig(chunked_prefill=True, prefill_tokens=prefill_tokens)
    config = ServingConfig(
        max_batch_size=16,
        n_slots=4096,
        max_batch_tokens=256,
        overlap=False,
        coarse_buckets=coarse,
        scheduling=scheduling,
    )
    assert {8, 16, 32, 48} <= set(serving_buckets(config))
    simulation = Simulation(config)
    for i in range(n_decodes):
        simulation.add_at(0.0, request(f"decode {i}", 1, 200))
    simulation.add_at(1.5, request("prompt", 100, 2))  # the others decode from the second iteration on
    simulation.run()
    taken = [
        n_tokens
        for record in simulation.timeline.iterations
        for name, n_tokens in zip(record.request_ids, record.input_lengths, strict=True)
        if name == "prompt"
    ]
    assert taken == [*chunks, 1]
