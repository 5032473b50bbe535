"""With `deterministic` no bit of a request's results depends on its neighbours or its arrival.

Log-probabilities reveal a different bit long before tokens do.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import Attention, ParallelConfig, ServingConfig
from orca_jax.model.transformer import init_parameters
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.sharding.partition import split_model
from tests.device.harness import Harness, harness
from tests.device.native.native_form import needs_native
from tests.gpt_config import gpt_config

MODEL = gpt_config(
    vocab_size=211, n_positions=96, hidden_size=48, n_layers=2, n_heads=3, ffn_size=80, vocab_multiple=8
)
MAX_BS = 10  # on a CPU sums are made otherwise from nine tokens on (native/few_tokens.h)
N_KINDS = 5


@cache
def parameters() -> dict[str, jax.Array]:
    p = init_parameters(MODEL, jax.random.key(3), jnp.float32)
    return {name: value * (1 if value.ndim == 1 else 12) for name, value in p.items()}


@cache
def engine(n_stages: int, attention: Attention = "follow_lengths", *, deterministic: bool = True) -> Harness:
    serving = ServingConfig(
        max_batch_size=MAX_BS, n_slots=800, max_batch_tokens=128, block_size=8, deterministic=deterministic
    )
    parts = split_model(MODEL, jax.devices(), ParallelConfig(pipeline_parallel=n_stages))
    return harness(MODEL, parameters(), serving, attention=attention, parts=parts)


def request(kind: int, name: str) -> Request:
    """One of N_KINDS requests, which differ in all parameters."""
    rng = np.random.default_rng(kind)
    asked: dict[str, Any] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.2, "top_k": 40, "repetition_penalty": 1.3},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {7: 2.0}},
    ][kind]
    prompt = tuple(rng.integers(0, 211, [1, 40, 2, 63, 17][kind]).tolist())
    n_output = [20, 12, 25, 9, 15][kind]
    sampling = SamplingParams(max_tokens=n_output, logprobs=3, ignore_eos=True, **asked)
    return Request(name, prompt, len(prompt) + n_output, sampling, seed=kind)


def outcome(request: Request) -> tuple[list[int], list[Any]]:
    return request.output_ids, request.logprobs


@cache
def alone(kind: int, n_stages: int, attention: Attention) -> tuple[list[int], list[Any]]:
    one = request(kind, "alone")
    engine(n_stages, attention).run([one])
    return outcome(one)


crowds = st.lists(st.tuples(st.integers(0, N_KINDS - 1), st.integers(0, 30)), min_size=2, max_size=12)


@pytest.mark.matrix(but=["1-native"])
@pytest.mark.parametrize(
    ("n_stages", "attention"),
    [
        pytest.param(1, "follow_lengths", marks=pytest.mark.long),
        pytest.param(1, "static", marks=pytest.mark.long),
        (2, "follow_lengths"),
        pytest.param(1, "native", marks=needs_native),
    ],
)
@settings(max_examples=12)
@given(crowd=crowds)
def test_no_bit_depends_on_what_else_runs(
    n_stages: int, attention: Attention, crowd: list[tuple[int, int]]
) -> None:
    requests = [request(kind, str(i)) for i, (kind, _) in enumerate(crowd)]
    engine(n_stages, attention).run(requests, [step for _, step in crowd])
    for one, (kind, _) in zip(requests, crowd, strict=True):
        assert outcome(one) == alone(kind, n_stages, attention)


@pytest.mark.long
def test_without_deterministic_bits_depend_on_neighbours() -> None:
    """If they did not, the tests of this file would prove nothing."""
    plain = engine(1, deterministic=False)
    result = set[str]()
    for n in (1, 2, 10):
        requests = [request(1, str(i)) for i in range(n)]
        plain.run(requests, list(range(n)))
        result |= {repr(one.logprobs) for one in requests}
    assert len(result) > 1


@pytest.mark.matrix(but=["2"])
@pytest.mark.parametrize("n_stages", [1, 2])
def test_each_phase_has_one_shape(n_stages: int) -> None:
    house = engine(n_stages)
    timeline = house.scheduler.timeline
    n_before = len(timeline.iterations)
    house.run([request(i % N_KINDS, str(i)) for i in range(9)], [0, 0, 1, 2, 3, 4, 4, 9, 20])
    records = list(timeline.iterations)[n_before:]
    assert {len(set(record.initiation)) for record in records} == {1}
    assert {True, False} == {record.initiation[0] for record in records}
