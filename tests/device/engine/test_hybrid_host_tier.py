"""Hybrids with a host tier: blocks come back with the state after them, and tokens are the reference's."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_jax.config import ParallelConfig, SchedulingConfig, ServingConfig, Sizes
from orca_jax.errors import ConfigError
from orca_jax.planning.sizes import serving_config
from orca_jax.planning.stage_memory import StageRoom
from orca_jax.request.request import Request
from orca_jax.sharding.partition import split_model
from tests.device.engine.test_hybrid import EVERY, RECURRENT_LAST, local_workers
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import Harness, greedy_request, harness
from tests.device.model.drawn_weights import drawn

# Slots for two requests of three, and places for the blocks and states of several.
SERVING = ServingConfig(
    max_batch_size=3,
    n_slots=80,
    block_size=4,
    max_batch_tokens=16,
    n_host_blocks=40,
    n_snapshots=3,
    n_host_states=12,
    scheduling=SchedulingConfig(prefill_tokens=8, snapshot_blocks=2),
)


@cache
def playing(n_stages: int) -> Callable[[list[Request], ServingConfig], Harness]:
    """Plays requests on engines with the same programs."""
    parts = split_model(EVERY, jax.devices(), ParallelConfig(pipeline_parallel=n_stages))
    parameters = drawn(EVERY, 5)
    workers = local_workers(harness(EVERY, parameters, SERVING, buckets=(4, 16), parts=parts)).workers
    reference = GreedyReference(EVERY, parameters)

    def play(asked: list[Request], serving: ServingConfig) -> Harness:
        for worker in workers:
            worker.renew()
        ran = harness(EVERY, {}, serving, buckets=(4, 16), parts=parts, workers=workers)
        ran.run(asked, [3 * i for i in range(len(asked))])
        assert sum(reference.sure(request, 1e-4) for request in asked) > 0
        return ran

    return play


def texts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, EVERY.vocab_size, 40).tolist() for _ in range(4)]


@pytest.mark.parametrize("n_stages", [1, pytest.param(3, marks=pytest.mark.matrix)])
def test_conversations_find_their_beginnings_in_the_host_tier(n_stages: int) -> None:
    n_cached: list[int] = []
    for serving in (SERVING, replace(SERVING, n_host_blocks=0, n_host_states=0)):
        asked = [
            greedy_request(f"{turn} {i}", text[: 13 + 8 * turn], 4)
            for turn in range(3)
            for i, text in enumerate(texts())
        ]
        ran = playing(n_stages)(asked, serving)
        n_cached.append(sum(request.n_cached for request in asked))
        if ran.kv.host_states is not None:
            assert ran.kv.host_states.n_stored > 5 and ran.kv.host_states.n_read > 3
            assert len(ran.kv.host_states) <= serving.n_host_states
    assert n_cached[0] > n_cached[1] + 40, "found with the tier, and without"


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 9)), min_size=4, max_size=14))
def test_tokens_are_the_references_under_random_schedules(drawn_: list[tuple[int, int, int]]) -> None:
    asked = [greedy_request(str(i), texts()[of][:n], n_output) for i, (of, n, n_output) in enumerate(drawn_)]
    playing(1)(asked, SERVING)


def sized(n_bytes: int, snapshot_bytes: int | None = None) -> ServingConfig:
    """Sizes of a model whose state has 400 bytes, and a block of four tokens 512."""
    room = StageRoom(layers=range(3), n_devices=1, itemsize=4, attention="static", free=None, modest=1 << 31)
    asked = Sizes(
        kv_host_bytes=n_bytes,
        block_size=4,
        max_batch_size=4,
        max_batch_tokens=16,
        snapshot_bytes=snapshot_bytes,
        snapshot_blocks=2,
    )
    return serving_config(RECURRENT_LAST, asked, [room])


@pytest.mark.parametrize(
    ("n_bytes", "n_states", "n_blocks"),
    [(10_000, 7, 14), (1424, 1, 2), (912, 1, 1)],  # mostly a state for each two blocks
)
def test_blocks_and_states_share_the_bytes(n_bytes: int, n_states: int, n_blocks: int) -> None:
    serving = sized(n_bytes)
    assert (serving.n_host_states, serving.n_host_blocks) == (n_states, n_blocks)
    assert (serving.host_state_bytes, serving.host_block_bytes) == (400, 512)


def test_what_a_tier_needs_is_said() -> None:
    with pytest.raises(
        ConfigError, match=r"one block of .* takes 512 bytes, and a recurrent state 400, which"
    ):
        sized(799)
    with pytest.raises(
        ConfigError, match="no snapshot fits on the devices; leave it out, or raise snapshot_b"
    ):
        sized(10_000, snapshot_bytes=0)
