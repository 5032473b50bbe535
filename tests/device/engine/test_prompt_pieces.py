"""A prompt may come in pieces, behind a cached beginning, or again: the output is the same."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.worker import LocalWorkers, Worker
from orca_jax.families.gpt_config import gpt_config
from orca_jax.grammar.constraint import BadWords, ConstraintRules
from orca_jax.model.gpt import init_parameters
from orca_jax.request.request import Request
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.sharding.partition import StagePart, split_model
from tests.device.harness import Harness, harness
from tests.random_pieces import RandomPieces

MODEL = gpt_config(
    vocab_size=67, n_positions=48, hidden_size=16, n_layers=2, n_heads=2, ffn_size=24, vocab_multiple=2
)
BLOCK_SIZE = 4
SERVING = ServingConfig(max_batch_size=3, n_slots=144, max_batch_tokens=64, block_size=BLOCK_SIZE)
# The newest tokens stay on the device and iterations overlap, or do not; or they go by way of the host.
Mode = Literal["overlap", "no overlap", "through the host"]
MODES: tuple[Mode, ...] = ("overlap", "no overlap", "through the host")


@dataclass(frozen=True)
class PlannedRequest:
    """A request that arrives before a step."""

    arrival: int
    prompt: tuple[int, ...]
    n_output: int
    sampling: SamplingParams
    banned: tuple[int, ...] = ()


@cache
def parameters() -> dict[str, jax.Array]:
    """Random weights, spread so that tokens vary and choices are sure."""
    p = init_parameters(MODEL, jax.random.key(5), jnp.float32)
    return {name: value * (1 if value.ndim == 1 else 12) for name, value in p.items()}


@cache
def stages(n_stages: int) -> tuple[tuple[StagePart, ...], tuple[Worker, ...]]:
    parts = split_model(MODEL, jax.devices(), ParallelConfig(pipeline_parallel=n_stages))
    engine = harness(MODEL, parameters(), SERVING, buckets=(8, 64), parts=parts).scheduler.engine
    assert isinstance(engine, EngineMaster)
    assert isinstance(engine._workers, LocalWorkers)
    return parts, engine._workers.workers


def built(n_stages: int, mode: Mode) -> Harness:
    parts, workers = stages(n_stages)
    serving = replace(SERVING, overlap=mode == "overlap")
    ran = harness(MODEL, {}, serving, buckets=(8, 64), parts=parts, workers=workers)
    if mode == "through the host":
        assert isinstance(ran.scheduler.engine, EngineMaster)
        ran.scheduler.engine.keeps_tokens = False
    return ran


def request(name: str, planned: PlannedRequest) -> Request:
    rules = ConstraintRules(vocab_size=MODEL.vocab_size, bad_words=BadWords((i,) for i in planned.banned))
    return Request(
        name,
        planned.prompt,
        len(planned.prompt) + planned.n_output,
        planned.sampling,
        seed=int(name),
        end_token_ids=frozenset({5}),
        constraint=rules.begin(),
    )


def play(
    all_planned: Sequence[PlannedRequest],
    n_stages: int,
    mode: Mode,
    *,
    pieces: random.Random | None = None,
    lost_before: int = -1,
) -> tuple[list[Request], int]:
    """The requests, and how many rows were cut; before step `lost_before` all caches are lost."""
    ran = built(n_stages, mode)
    requests = [request(str(i), planned) for i, planned in enumerate(all_planned)]
    if pieces is not None:
        ran.scheduler.policy = RandomPieces(ran.scheduler.policy, pieces)

    def before_step(step: int) -> None:
        if step == lost_before:
            for worker in stages(n_stages)[1]:
                worker.renew()
            # What waited for a token before it will not come back either.
            assert isinstance(ran.scheduler.engine, EngineMaster)
            assert isinstance(ran.scheduler.engine._workers, LocalWorkers)
            ran.scheduler.engine._workers._to_do.clear()
            ran.scheduler.run_again()

    ran.run(requests, [planned.arrival for planned in all_planned], before_step)
    policy = ran.scheduler.policy
    return requests, policy.n_pieces if isinstance(policy, RandomPieces) else 0


def assert_same(result: Request, unsplit: Request) -> None:
    assert (result.output_ids, result.finish_reason) == (unsplit.output_ids, unsplit.finish_reason)
    assert (result.prompt_logprobs is None) == (unsplit.prompt_logprobs is None)
    for ours, theirs in (
        (result.logprobs, unsplit.logprobs),
        (result.prompt_logprobs, unsplit.prompt_logprobs),
    ):
        assert_same_logprobs(ours or [], theirs or [])


def assert_same_logprobs(result: Sequence[TokenLogprobs], unsplit: Sequence[TokenLogprobs]) -> None:
    assert [token.token_id for token in result] == [token.token_id for token in unsplit]
    np.testing.assert_allclose(
        [token.logprob for token in result], [token.logprob for token in unsplit], atol=1e-3
    )
    for ours, theirs in zip(result, unsplit, strict=True):
        np.testing.assert_allclose([v for _, v in ours.top], [v for _, v in theirs.top], atol=1e-3)


tokens = st.integers(0, MODEL.vocab_size - 1)
planned_requests = st.lists(
    st.builds(
        PlannedRequest,
        arrival=st.integers(0, 8),
        prompt=st.lists(tokens, min_size=1, max_size=30).map(tuple),
        n_output=st.integers(1, 10),
        sampling=st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.0, 1.0]),
            top_p=st.sampled_from([1.0, 0.7]),
            repetition_penalty=st.sampled_from([1.0, 1.7]),
            frequency_penalty=st.sampled_from([0.0, 1.5]),
            logit_bias=st.dictionaries(tokens, st.sampled_from([-5.0, 5.0]), max_size=2),
            logprobs=st.none() | st.integers(0, 3),
            prompt_logprobs=st.none() | st.integers(0, 3),
        ),
        banned=st.lists(tokens, max_size=2, unique=True).map(tuple),
    ),
    min_size=1,
    max_size=6,
)


LONG_PROMPTS = [
    PlannedRequest(i, tuple(range(i, i + 30)), 6, SamplingParams(temperature=0.0, ignore_eos=True), (1, 2))
    for i in range(5)
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_stages", [1, 2])
def test_in_pieces_the_output_is_that_of_whole_prompts(n_stages: int, mode: Mode) -> None:
    n_cut = 0

    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example(all_planned=LONG_PROMPTS, seed=1, lost_before=3)
    @given(all_planned=planned_requests, seed=st.integers(0, 1 << 16), lost_before=st.integers(-1, 20))
    def outputs_are_the_same(all_planned: list[PlannedRequest], seed: int, lost_before: int) -> None:
        nonlocal n_cut
        unsplit, _ = play(all_planned, n_stages, "no overlap")
        in_pieces, n = play(all_planned, n_stages, mode, pieces=random.Random(seed), lost_before=lost_before)
        n_cut += n
        for ours, theirs in zip(in_pieces, unsplit, strict=True):
            assert_same(ours, theirs)

    outputs_are_the_same()
    assert n_cut > 10


PROMPT = tuple(np.random.default_rng(8).integers(0, MODEL.vocab_size, 23).tolist())
PLAIN = SamplingParams(temperature=0.0, ignore_eos=True)
PARAMS = [
    PLAIN,
    SamplingParams(temperature=0.8, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.9, frequency_penalty=1.2),
    SamplingParams(temperature=1.0, presence_penalty=1.5, logit_bias={3: 4.0}),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("sampling", PARAMS)
def test_a_prompt_that_continues_blocks_of_another_request(
    mode: Mode, in_pieces: bool, sampling: SamplingParams
) -> None:
    """Its block table names the other's first blocks, and it computes only what comes after them."""
    n_shared_blocks = 4
    n_shared = n_shared_blocks * BLOCK_SIZE
    first = PlannedRequest(0, PROMPT, 12, PLAIN)
    second = PlannedRequest(0, (*PROMPT[:n_shared], 9, 8, 7, 6, 5), 10, sampling)
    (alone_a, alone_b), _ = play([first, second], 1, "no overlap")

    ran = built(1, mode)
    if in_pieces:
        ran.scheduler.policy = RandomPieces(ran.scheduler.policy, random.Random(1))
    a, b = request("0", first), request("1", second)
    ran.pool.add(a)
    while not a.output_ids:
        ran.scheduler.step()
    table, reserve, release = ran.kv.block_table, ran.kv.reserve, ran.kv.release
    own: list[int] = []

    def reserve_sharing(max_tokens: int) -> int:
        row = reserve(max_tokens)
        own[:] = table[row, :n_shared_blocks].tolist()
        table[row, :n_shared_blocks] = table[a.row, :n_shared_blocks]
        return row

    def release_own(row: int) -> None:
        if row == b.row:
            table[row, :n_shared_blocks] = own
        release(row)

    ran.kv.reserve, ran.kv.release = reserve_sharing, release_own
    b.n_computed = n_shared
    ran.run([b])
    assert not set(own) & set(table[a.row, :n_shared_blocks].tolist())
    in_prompt, n_computed = True, n_shared
    for iteration in ran.scheduler.timeline.iterations:
        if in_prompt and "1" in iteration.request_ids:
            place = iteration.request_ids.index("1")
            n_computed += iteration.input_lengths[place]
            assert iteration.initiation[place] and n_computed <= len(second.prompt)
            in_prompt = n_computed < len(second.prompt)
    assert not in_prompt and b.n_iterations >= second.n_output
    assert_same(a, alone_a)
    assert_same(b, alone_b)
