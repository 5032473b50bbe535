"""The engine's tokens against `model/reference.py`, whatever the batch, order, buckets or block size."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.config import Attention, ServingConfig
from orca_jax.execution.worker import Worker
from orca_jax.model.transformer import init_parameters
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import finish_reasons, greedy_request, harness, single_worker
from tests.device.native.native_form import has_native
from tests.gpt_config import gpt_config

MODEL = gpt_config(
    vocab_size=211, n_positions=96, hidden_size=48, n_layers=2, n_heads=3, ffn_size=40, vocab_multiple=8
)
CONFIGURATIONS: list[tuple[int, tuple[int, ...], Attention]] = [
    (16, (8, 96), "follow_lengths"),
    (4, (1, 16, 40, 96), "follow_lengths"),
    (64, (96,), "static"),
    *([(8, (8, 40, 96), "native")] if has_native() else ()),
]
MAX_BS = 5


@cache
def parameters() -> dict[str, jax.Array]:
    """Random weights, spread so that greedy tokens vary."""
    p = init_parameters(MODEL, jax.random.key(3), jnp.float32)
    return {name: value * (1 if value.ndim == 1 else 12) for name, value in p.items()}


@cache
def worker(configuration: int) -> tuple[Worker, ServingConfig]:
    block_size, _, attention = CONFIGURATIONS[configuration]
    serving = ServingConfig(
        max_batch_size=MAX_BS, n_slots=320, max_batch_tokens=96, block_size=block_size
    )  # 320 slots: three of the longest requests, so that reservations are what limits
    return single_worker(MODEL, parameters(), serving, n_rows=2 * MAX_BS, attention=attention), serving


@cache
def greedy_reference() -> GreedyReference:
    return GreedyReference(MODEL, parameters())


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[Request], list[int]]:
    requests, arrivals = [], []
    for i in range(draw(st.integers(1, 9))):
        n_input = draw(st.integers(1, 90))
        rng = np.random.default_rng(draw(st.integers(0, 2**20)))
        n_output = draw(st.integers(1, min(25, MODEL.n_positions - n_input)))
        requests.append(greedy_request(str(i), rng.integers(0, 211, n_input).tolist(), n_output))
        arrivals.append(draw(st.integers(0, 12)))
    return requests, arrivals


@settings(max_examples=16)
@given(schedule=schedules(), configuration=st.integers(0, len(CONFIGURATIONS) - 1))
def test_tokens_are_the_references_under_random_schedules(
    schedule: tuple[list[Request], list[int]], configuration: int
) -> None:
    requests, arrivals = schedule
    device, serving = worker(configuration)
    engine = harness(MODEL, parameters(), serving, buckets=CONFIGURATIONS[configuration][1], workers=[device])
    engine.run(requests, arrivals)
    for request in requests:
        assert len(request.output_ids) == request.max_tokens - len(request.prompt_ids)
        greedy_reference().sure(request)


@settings(max_examples=15)
@given(schedule=schedules(), cancels=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=6))
def test_cancelling_some_changes_nothing_for_the_others(
    schedule: tuple[list[Request], list[int]], cancels: list[tuple[int, int]]
) -> None:
    requests, arrivals = schedule
    device, serving = worker(0)
    engine = harness(MODEL, parameters(), serving, buckets=CONFIGURATIONS[0][1], workers=[device])

    def cancel(step: int) -> None:
        for at, which in cancels:
            if at == step:
                engine.pool.end_named(str(which), FinishReason.CANCELLED)

    engine.run(requests, arrivals, before_step=cancel)
    reasons = finish_reasons(engine.deliveries)
    assert set(reasons) == {request.request_id for request in requests}
    for request in requests:
        if reasons[request.request_id] is FinishReason.LENGTH:
            assert len(request.output_ids) == request.max_tokens - len(request.prompt_ids)
        greedy_reference().sure(request)


def test_a_request_that_runs_again_goes_on_where_it_stopped() -> None:
    """After a fault a request starts with all its tokens as input and holds its reservation."""
    device, serving = worker(0)
    serving = replace(serving, overlap=False)  # nothing of it is in flight between two turns
    engine = harness(MODEL, parameters(), serving, buckets=CONFIGURATIONS[0][1], workers=[device])
    again = greedy_request("again", [5, 6, 7], 20)
    other = greedy_request("other", [9] * 30, 20)
    engine.pool.add(again)
    engine.pool.add(other)
    for _ in range(6):
        engine.scheduler.step()
    again.state = type(again.state).INITIATION
    engine.run([])
    assert len(again.output_ids) == len(other.output_ids) == 20
    greedy_reference().sure(again)
    greedy_reference().sure(other)


def test_sampled_tokens_do_not_depend_on_neighbours_order_or_bucket() -> None:
    def requests() -> list[Request]:
        rng = np.random.default_rng(1)
        made = []
        for i in range(8):
            sampling = SamplingParams(
                max_tokens=12,
                temperature=[0.0, 0.7, 1.0, 1.5][i % 4],
                top_k=[0, 0, 9][i % 3],
                top_p=[1.0, 0.8][i % 2],
            )
            prompt = tuple(rng.integers(0, 211, 5 + 7 * i).tolist())
            made.append(Request(str(i), prompt, len(prompt) + 12, sampling, seed=(i << 40) - i))
        return made

    device, serving = worker(0)
    together = harness(MODEL, parameters(), serving, buckets=(8, 96), workers=[device]).run(requests())
    late = harness(MODEL, parameters(), serving, buckets=(8, 96), workers=[device]).run(
        requests()[::-1], arrivals=[0, 1, 2, 3, 5, 8, 8, 9]
    )
    alone = {}
    for request in requests():
        alone |= harness(MODEL, parameters(), serving, buckets=(8, 96), workers=[device]).run([request])
    assert together == late == alone
    assert len({tuple(tokens) for tokens in together.values()}) == 8


@pytest.mark.parametrize("sizes", [(8, 96), (96,)])
def test_the_same_request_twice_gives_the_same_tokens(sizes: tuple[int, ...]) -> None:
    device, serving = worker(0)
    engine = harness(MODEL, parameters(), serving, buckets=sizes, workers=[device])
    first = engine.run([greedy_request("a", range(40), 30)])["a"]
    assert engine.run([greedy_request("a", range(40), 30), greedy_request("b", range(1), 30)])["a"] == first


def test_figure_5_of_the_paper() -> None:
    """Four requests, seven tokens: merged for the linear operations, split for attention, merged again.

    x1 and x2 are in the increment phase, x3 and x4 in the initiation phase with 2 and 3 tokens.
    """
    device, serving = worker(0)
    engine = harness(MODEL, parameters(), serving, buckets=CONFIGURATIONS[0][1], workers=[device])
    x1, x2 = greedy_request("x1", [1, 2, 3], 4), greedy_request("x2", [4, 5], 4)
    x3, x4 = greedy_request("x3", [6, 7], 4), greedy_request("x4", [8, 9, 10], 4)
    for request in (x1, x2):
        engine.pool.add(request)
    engine.scheduler.step()
    for request in (x3, x4):
        engine.pool.add(request)
    engine.scheduler.step()
    record = engine.scheduler.timeline.iterations[-1]
    assert record.request_ids == ("x1", "x2", "x3", "x4")
    assert record.initiation == (False, False, True, True)
    assert record.input_lengths == (1, 1, 2, 3)
    assert record.n_tokens == 7
    engine.run([])
    for request in (x1, x2, x3, x4):
        greedy_reference().sure(request)
