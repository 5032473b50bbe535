"""The baseline on the real engine returns the same tokens as ORCA's scheduler and the reference."""

import time
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.paper.request_level import RequestLevelScheduler, RowWork
from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.launch.local_engine import build_engine
from orca_jax.model.transformer import init_parameters
from orca_jax.request.request import Request
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.sharding.partition import split_model
from orca_jax.simulation.simulation import Shown, shown
from tests.device.greedy_reference import GreedyReference
from tests.device.harness import greedy_request, place
from tests.gpt_config import gpt_config

MODEL = gpt_config(vocab_size=211, n_positions=64, hidden_size=24, n_layers=4, n_heads=3, ffn_size=40)
SERVING = ServingConfig(max_batch_size=4, n_slots=4 * 64, max_batch_tokens=256, block_size=8)


@cache
def parameters() -> dict[str, jax.Array]:
    """Random weights, spread so that greedy tokens vary."""
    p = init_parameters(MODEL, jax.random.key(3), jnp.float32)
    return {name: value * (1 if value.ndim == 1 else 12) for name, value in p.items()}


@cache
def greedy_reference() -> GreedyReference:
    return GreedyReference(MODEL, parameters())


def requests() -> list[Request]:
    """Eleven requests of unequal lengths, among them the shortest and the longest possible."""
    rng = np.random.default_rng(7)
    drawn = [(1, 63), (63, 1), *((int(rng.integers(1, 40)), int(rng.integers(1, 20))) for _ in range(9))]
    return [
        greedy_request(str(i), rng.integers(0, MODEL.vocab_size, n_input).tolist(), n_output)
        for i, (n_input, n_output) in enumerate(drawn)
    ]


@pytest.mark.long  # tests/host/bench has the scheduler without an engine
@pytest.mark.parametrize(
    ("n_stages", "mbs", "ahead"), [(1, 4, False), (1, 3, True), (2, 4, True), (2, 2, False), (2, 1, True)]
)
def test_the_tokens_are_those_of_orca_and_of_the_reference(n_stages: int, mbs: int, ahead: bool) -> None:
    """Either the host reads each token, or the baseline issues the next iteration before it does."""
    parts = split_model(MODEL, jax.devices(), ParallelConfig(pipeline_parallel=n_stages))
    built = build_engine(MODEL, place(MODEL, parameters(), parts), SERVING, parts, buckets=(8, 64, 256))
    by_request = EngineMaster(
        built.workers,
        built.kv,
        vocab_size=MODEL.vocab_size,
        n_workers=n_stages,
        keeps_tokens=ahead,
    )
    played: list[list[Request]] = []
    for baseline in (True, False, True):  # and it leaves nothing behind that others stumble over
        timeline = Timeline(time.monotonic)
        deliveries: list[Shown] = []
        pool = RequestPool(
            max_waiting=99,
            on_arrival=timeline.arrived,
            on_deliveries=lambda some, seen=deliveries: seen.extend(shown(some)),
        )
        if baseline:
            scheduler = RequestLevelScheduler(
                pool,
                by_request,
                built.kv,
                max_bs=SERVING.max_batch_size,
                mbs=mbs,
                max_length=MODEL.n_positions,
                timeline=timeline,
            )
        else:
            scheduler = Scheduler(pool, built.engine, built.kv, config=SERVING, timeline=timeline)
        played.append(requests())
        for request in played[-1]:
            pool.add(request)
        for _ in range(10_000):
            if not scheduler.step():
                break
        assert len(pool) == 0 and built.kv.n_free_blocks == built.kv.n_blocks
        for request in played[-1]:
            delivered = [token_id for req, token_id, _ in deliveries if req is request]
            assert delivered == request.output_ids and len(delivered) == request.sampling.max_tokens
        if isinstance(scheduler, RequestLevelScheduler):
            work = {work for record in scheduler.iterations for work in record.rows}
            assert work == set(RowWork), "rows of every kind are in the test"
    n_sure = 0
    for ours, orca, again in zip(*played, strict=True):
        n, *others = map(greedy_reference().sure, (ours, orca, again))
        assert others == [n, n]
        assert ours.output_ids[:n] == orca.output_ids[:n] == again.output_ids[:n]
        n_sure += n
    assert n_sure > 100, "most choices are sure"
