"""Batches pass through the stages, as many in flight as there are stages (ORCA 4.2, Figure 8a)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.config import ParallelConfig, ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.sampling import DeviceTokens, TokenChooser
from orca_jax.execution.worker import LocalWorkers, Worker
from orca_jax.iteration.flat_batch import FlatBatch
from orca_jax.model.transformer import init_parameters
from orca_jax.request.request import Request
from orca_jax.scheduling.timeline import IterationRecord
from orca_jax.sharding.partition import StagePart, split_model
from tests.device.harness import Harness, greedy_request, harness
from tests.gpt_config import gpt_config

MODEL = gpt_config(
    vocab_size=67, n_positions=32, hidden_size=16, n_layers=4, n_heads=2, ffn_size=24, vocab_multiple=2
)
MAX_BS = 2
SERVING = ServingConfig(max_batch_size=MAX_BS, n_slots=512, max_batch_tokens=32, block_size=4, overlap=False)
HELD_SECONDS = 2.0


@cache
def parameters() -> dict[str, jax.Array]:
    return init_parameters(MODEL, jax.random.key(1), jnp.dtype("float32"))


@cache
def stages(n_stages: int, tensor: int) -> tuple[tuple[StagePart, ...], tuple[Worker, ...]]:
    """The stages' workers, kept between tests so that each split compiles once."""
    parts = split_model(
        MODEL, jax.devices(), ParallelConfig(pipeline_parallel=n_stages, tensor_parallel=tensor)
    )
    built = harness(MODEL, parameters(), SERVING, parts=parts).scheduler.engine
    assert isinstance(built, EngineMaster)
    assert isinstance(built._workers, LocalWorkers)
    return parts, built._workers.workers


def engine(n_stages: int, tensor: int = 1, *, overlap: bool = False) -> Harness:
    """A new engine on these stages."""
    parts, workers = stages(n_stages, tensor)
    serving = replace(SERVING, overlap=overlap)
    return harness(MODEL, {}, serving, buckets=(8, 32), parts=parts, workers=workers)


def requests(n: int, lengths: Sequence[int]) -> list[Request]:
    """Requests A, B, C, ... of one to three input tokens and these numbers of output tokens, in turn."""
    return [
        greedy_request(chr(ord("A") + i), range(i, i + 1 + i % 3), lengths[i % len(lengths)])
        for i in range(n)
    ]


@dataclass
class Recorded:
    """The calls, in order: ("forward", iteration, stage from 1) and ("fetch", iteration, 0)."""

    calls: list[tuple[str, int, int]] = field(default_factory=list)

    def issues_before_fetch(self, iteration: int) -> int:
        """The forward passes that started before the host asked for the tokens of an iteration."""
        return sum(
            kind == "forward" for kind, _, _ in self.calls[: self.calls.index(("fetch", iteration, 0))]
        )


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Record every forward pass of a worker and every read of tokens by the host."""
    result = Recorded()
    forward, choose, fetch = Worker.forward, TokenChooser.choose, DeviceTokens.fetch
    stage, iteration = 0, -1
    iteration_of: dict[int, int] = {}
    kept: list[DeviceTokens] = []  # so that no id is given twice

    def recording_forward(self: Worker, flat: FlatBatch, arrived: jax.Array) -> Any:
        nonlocal stage, iteration
        if self.stage.part.first:
            stage, iteration = 0, iteration + 1
        stage += 1
        result.calls.append(("forward", iteration, stage))
        return forward(self, flat, arrived)

    def recording_choose(self: TokenChooser, *given: Any) -> DeviceTokens:
        tokens = choose(self, *given)
        kept.append(tokens)
        iteration_of[id(tokens)] = iteration
        return tokens

    def recording_fetch(self: DeviceTokens) -> Any:
        result.calls.append(("fetch", iteration_of[id(self)], 0))
        return fetch(self)

    monkeypatch.setattr(Worker, "forward", recording_forward)
    monkeypatch.setattr(TokenChooser, "choose", recording_choose)
    monkeypatch.setattr(DeviceTokens, "fetch", recording_fetch)
    return result


def in_flight(iterations: Sequence[IterationRecord], now: float) -> int:
    """The number of batches issued before `now` that had not returned by then."""
    return sum(
        iteration.issued < now and iteration.returned is not None and iteration.returned >= now
        for iteration in iterations
    )


def test_batches_pass_as_in_figure_8a(recorded: Recorded) -> None:
    """Three workers, max_bs 2, requests A to F in the order they arrived, all waiting at the start."""
    n_output = 4
    ran = engine(3)
    ran.run(requests(6, [n_output]))
    iterations = list(ran.scheduler.timeline.iterations)

    runs = dict.fromkeys("ABCDEF", 0)
    named: list[str] = []
    for iteration in iterations:
        for name in iteration.request_ids:
            runs[name] += 1
        named.append("".join(f"{name}{runs[name]}" for name in iteration.request_ids))
    assert named == [
        "A1B1", "C1D1", "E1F1",
        "A2B2", "C2D2", "E2F2",
        "A3B3", "C3D3", "E3F3",
        "A4B4", "C4D4", "E4F4",
    ]  # fmt: skip
    # AB is waited for only after CD and EF were injected; from then on one returns, the next goes in.
    assert [in_flight(iterations, iteration.issued) for iteration in iterations] == [0, 1, *[2] * 10]
    ends = [iteration.returned for iteration in iterations if iteration.returned is not None]
    assert [in_flight(iterations, end) for end in ends] == [*[3] * 10, 2, 1]
    # The same, as the workers saw it: each batch goes through Worker1, 2 and 3 in turn.
    assert [call for call in recorded.calls if call[0] == "forward"] == [
        ("forward", i, worker) for i in range(3 * n_output) for worker in (1, 2, 3)
    ]
    assert [i for kind, i, _ in recorded.calls if kind == "fetch"] == list(range(3 * n_output))


@pytest.mark.matrix(but=["2-1", "3-1"])
@pytest.mark.parametrize(("n_stages", "tensor"), [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_as_many_batches_are_in_flight_as_there_are_stages(n_stages: int, tensor: int) -> None:
    """When the host waits for a batch, every stage has one, if there are enough requests."""
    ran = engine(n_stages, tensor)
    asked = requests(4 * n_stages, [3, 7, 1, 5, 9])
    arrivals = [0] * (2 * n_stages) + [3 + i for i in range(2 * n_stages)]
    ran.run(asked, arrivals)
    timeline = ran.scheduler.timeline
    assert len(timeline.requests) == len(asked)
    n_full = 0
    for iteration in timeline.iterations:
        end = iteration.returned
        assert end is not None
        there = in_flight(list(timeline.iterations), end)
        assert 1 <= there <= n_stages
        # What arrives during the wait cannot have been issued before it.
        began = max(iteration.issued for iteration in timeline.iterations if iteration.issued < end)
        n_live = sum(
            record.arrived < began and record.finished is not None and record.finished >= end
            for record in timeline.requests
        )
        if n_live > (n_stages - 1) * MAX_BS:  # else one batch fewer may hold them all
            assert there == n_stages
            n_full += 1
    assert n_full > len(timeline.iterations) // 3


@pytest.mark.matrix(but=["2-False", "2-True", "3-False", "3-True"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n_stages", [1, 2, 3, 4])
def test_the_host_reads_a_batch_only_when_every_stage_has_one(
    n_stages: int, overlap: bool, recorded: Recorded
) -> None:
    """With overlap there is one more batch: the first stage has its next one before it is done."""
    n_output = 3
    engine(n_stages, overlap=overlap).run(requests(2 * n_stages, [n_output]))
    n_iterations = n_stages * n_output
    for i in range(n_iterations):
        # Each stage was handed iterations 0 to i + N - 1: the first has N - 1 behind the one that is read.
        handed = min(i + n_stages + overlap, n_iterations)
        assert recorded.issues_before_fetch(i) == handed * n_stages
    # On its way through the stages a batch meets no reading.
    for i in range(n_iterations):
        start = recorded.calls.index(("forward", i, 1))
        through = recorded.calls[start : start + n_stages]
        assert through == [("forward", i, stage) for stage in range(1, n_stages + 1)]


@pytest.mark.matrix(but=["2-1"])
@pytest.mark.parametrize(("n_stages", "tensor"), [(2, 1), (3, 1), (2, 2)])
def test_the_host_waits_for_no_device_when_it_issues(
    n_stages: int, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first stage's device is held up, every stage still gets a batch, and none finishes."""
    ran = engine(n_stages, tensor)
    ran.run(requests(2 * n_stages, [2]))  # compile, so that what is measured below is issuing alone
    _, (worker, *_) = stages(n_stages, tensor)

    @jax.jit
    def late(x: jax.Array, zeros: jax.Array, n: int) -> jax.Array:
        """Return the argument after n products."""
        return x + jax.lax.fori_loop(0, n, lambda _, z: z @ z, zeros)[0, 0]

    first, *others = worker.stage.weights
    on_device = [shard.data for shard in first.addressable_shards]
    zeros = jax.device_put(np.zeros((256, 256), np.float32), on_device[0].device)
    late(on_device[0], zeros, 1).block_until_ready()
    start = time.perf_counter()
    late(on_device[0], zeros, 100).block_until_ready()
    n_products = round(100 * HELD_SECONDS / (time.perf_counter() - start))
    on_device[0] = late(on_device[0], zeros, n_products)
    held = jax.make_array_from_single_device_arrays(first.shape, first.sharding, on_device)
    monkeypatch.setattr(worker.stage, "weights", [held, *others])
    issued: list[DeviceTokens] = []
    choose = TokenChooser.choose

    def keep(self: TokenChooser, *all_of_it: Any) -> DeviceTokens:
        issued.append(choose(self, *all_of_it))
        return issued[-1]

    monkeypatch.setattr(TokenChooser, "choose", keep)
    for request in requests(2 * n_stages, [2]):
        ran.pool.add(request)
    for _ in range(n_stages - 1):  # the step after these waits for the first batch
        ran.scheduler.step()
    assert len(issued) == n_stages - 1
    assert not any(tokens.is_ready() for tokens in issued)
    assert not on_device[0].is_ready(), "the device was held up for too short a time to tell"
    while ran.scheduler.step():
        pass
    assert all(tokens.is_ready() for tokens in issued)
