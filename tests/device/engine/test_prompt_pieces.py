"""A prompt computed in chunks, after a cached prefix, or a second time has the same output."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orca_jax.request.sampling_params import SamplingParams
from tests.device.engine.planned_requests import (
    BLOCK_SIZE,
    MODEL,
    MODES,
    Mode,
    PlannedRequest,
    assert_same,
    built,
    planned_requests,
    play,
    request,
)
from tests.random_pieces import RandomPieces

LONG_PROMPTS = [
    PlannedRequest(i, tuple(range(i, i + 30)), 6, SamplingParams(temperature=0.0, ignore_eos=True), (1, 2))
    for i in range(5)
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_stages", [1, pytest.param(2, marks=pytest.mark.long)])
def test_in_pieces_the_output_is_that_of_whole_prompts(n_stages: int, mode: Mode) -> None:
    n_cut = 0

    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example(all_planned=LONG_PROMPTS, seed=1, lost_before=3)
    @given(all_planned=planned_requests, seed=st.integers(0, 1 << 16), lost_before=st.integers(-1, 20))
    def outputs_are_the_same(all_planned: list[PlannedRequest], seed: int, lost_before: int) -> None:
        nonlocal n_cut
        unsplit, _ = play(all_planned, n_stages, "no overlap")
        in_pieces, ran = play(
            all_planned, n_stages, mode, pieces=random.Random(seed), lost_before=lost_before
        )
        assert isinstance(ran.policy, RandomPieces)
        n_cut += ran.policy.n_pieces
        for ours, theirs in zip(in_pieces, unsplit, strict=True):
            assert_same(ours, theirs)

    outputs_are_the_same()
    assert n_cut > 3  # the example alone has more


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
    """The block table names the other request's first blocks; only what follows them is computed."""
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

    def reserve_sharing(max_tokens: int, n_fixed: int = 0) -> int:
        row = reserve(max_tokens)
        own[:] = table[row, :n_shared_blocks].tolist()
        table[row, :n_shared_blocks] = table[a.row, :n_shared_blocks]
        return row

    def release_own(row: int) -> int:
        if row == b.row:
            table[row, :n_shared_blocks] = own
        return release(row)

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
