"""Overlap on the real engine: whichever requests end or leave, and when, all others' tokens stay the same."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.worker import LocalWorkers, Worker
from orca_jax.grammar.constraint import BadWords, ConstraintRules
from orca_jax.model.transformer import init_parameters
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.sharding.partition import StagePart, split_model
from tests.device.harness import Harness, harness
from tests.gpt_config import gpt_config

MODEL = gpt_config(
    vocab_size=67, n_positions=32, hidden_size=16, n_layers=2, n_heads=2, ffn_size=24, vocab_multiple=2
)
# Room for three of the longest: who comes later waits for blocks that others give back.
SERVING = ServingConfig(max_batch_size=3, n_slots=84, max_batch_tokens=32, block_size=4)
END = 5


@dataclass(frozen=True)
class PlannedRequest:
    """A request; `stop_at` tokens complete a stop string, before step `cancelled` it is asked to end."""

    arrival: int
    prompt: tuple[int, ...]
    n_output: int
    sampling: SamplingParams
    banned: tuple[int, ...] = ()
    stop_at: int | None = None
    cancelled: int | None = None


class StopString:
    """A stop string that the n-th token completes."""

    def __init__(self, n: int | None) -> None:
        self._left = n

    def push(self, token_id: int) -> bool:
        if self._left is not None:
            self._left -= 1
        return self._left == 0


@cache
def stages(n_stages: int) -> tuple[tuple[StagePart, ...], tuple[Worker, ...]]:
    parts = split_model(MODEL, jax.devices(), ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=1))
    parameters = init_parameters(MODEL, jax.random.key(3), jnp.dtype("float32"))
    built = harness(MODEL, parameters, SERVING, buckets=(8, 32), parts=parts).scheduler.engine
    assert isinstance(built, EngineMaster)
    assert isinstance(built._workers, LocalWorkers)
    return parts, built._workers.workers


def play(
    all_planned: Sequence[PlannedRequest], n_stages: int, *, overlap: bool, leaves: bool = True
) -> list[Request]:
    parts, workers = stages(n_stages)
    serving = replace(SERVING, overlap=overlap)
    ran: Harness = harness(MODEL, {}, serving, buckets=(8, 32), parts=parts, workers=workers)
    requests = [
        Request(
            str(i),
            planned.prompt,
            len(planned.prompt) + planned.n_output,
            planned.sampling,
            seed=i,
            end_token_ids=frozenset({END}),
            sink=StopString(planned.stop_at),
            constraint=ConstraintRules(
                vocab_size=MODEL.vocab_size, bad_words=BadWords((token_id,) for token_id in planned.banned)
            ).begin(),
        )
        for i, planned in enumerate(all_planned)
    ]

    def before_step(step: int) -> None:
        for request, planned in zip(requests, all_planned, strict=True):
            if leaves and planned.cancelled == step:
                ran.pool.end(request, FinishReason.CANCELLED)

    ran.run(requests, [planned.arrival for planned in all_planned], before_step)
    assert ran.kv.n_free_rows == ran.kv.n_rows and not ran.scheduler.leaving
    return requests


sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
)
planned_requests = st.lists(
    st.builds(
        PlannedRequest,
        arrival=st.integers(0, 12),
        prompt=st.lists(st.integers(0, MODEL.vocab_size - 1), min_size=1, max_size=9).map(tuple),
        n_output=st.integers(1, 12),
        sampling=sampling,
        banned=st.lists(st.integers(0, MODEL.vocab_size - 1), max_size=2, unique=True).map(tuple),
        stop_at=st.none() | st.integers(1, 8),
        cancelled=st.none() | st.integers(0, 25),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("n_stages", [1, pytest.param(2, marks=pytest.mark.long)])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(all_planned=planned_requests)
def test_same_tokens_with_and_without_overlap(n_stages: int, all_planned: list[PlannedRequest]) -> None:
    undisturbed = play(all_planned, n_stages, overlap=False, leaves=False)
    for request, whole in zip(play(all_planned, n_stages, overlap=True), undisturbed, strict=True):
        assert request.finish_reason is not None
        if request.finish_reason is FinishReason.CANCELLED:
            assert all_planned[int(request.request_id)].cancelled is not None
            assert request.output_ids == whole.output_ids[: len(request.output_ids)]
        else:
            assert (request.output_ids, request.finish_reason) == (whole.output_ids, whole.finish_reason)


def test_what_is_thrown_away_was_computed_in_the_request_s_own_blocks() -> None:
    """A request that stops runs once more. The one that waits for its blocks gets them after that."""
    plain = SamplingParams(temperature=0.0)
    first = PlannedRequest(0, (1, 2, 3), 25, plain, stop_at=3)
    others = [PlannedRequest(0, (4 + i,) * 5, 20, plain) for i in range(2)]
    waits = PlannedRequest(1, (9, 8, 7, 6), 24, plain)
    ran = {
        overlap: play([first, *others, waits], 1, overlap=overlap, leaves=False) for overlap in (False, True)
    }
    assert [r.output_ids for r in ran[True]] == [r.output_ids for r in ran[False]]
    assert [r.n_iterations for r in ran[True]] == [4, 20, 20, 24]
    assert [r.n_iterations for r in ran[False]] == [3, 20, 20, 24]
