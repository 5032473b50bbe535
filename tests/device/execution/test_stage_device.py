"""Stages with controllers and a transfer link, all in this process: their tokens, and recovery."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.config import Deadlines, ParallelConfig, ServingConfig
from orca_jax.control.bounded_queue import FrameQueue
from orca_jax.control.start_order import StartOrder
from orca_jax.engine.remote_workers import Arrival, RemoteEngine, RemoteWorkers
from orca_jax.errors import WorkerLost
from orca_jax.execution.stage_device import Event, JaxStageDevice, StageModel
from orca_jax.iteration.shape import bucket_for, bucket_sizes
from orca_jax.launch.local_memory import LocalMemory
from orca_jax.launch.remote_memory import write_adapters
from orca_jax.model import reference
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.transformer import Parameters, init_parameters
from orca_jax.planning.sizes import engine_shape, kv_manager
from orca_jax.request.request import Request
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.scheduling.restart import run_again
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.sharding.link import TransferLink
from orca_jax.sharding.partition import split_model
from orca_jax.workers.controller import Controller
from tests.device.execution.test_worker import compilations
from tests.device.harness import greedy_request, place
from tests.gpt_config import gpt_config

MODEL = gpt_config(vocab_size=68, n_positions=16, hidden_size=16, n_layers=4, n_heads=4, ffn_size=24)
SERVING = ServingConfig(max_batch_size=4, n_slots=80, max_batch_tokens=16, block_size=4)
DEADLINES = Deadlines(iteration_seconds=20, worker_seconds=30, ready_seconds=120)
SOON = 60.0
MARGIN = 1e-4  # of logits: where the two best are closer, another order of sums may choose the other


class StageHere:
    """A worker in this process: a controller, its device, and its end of the link."""

    def __init__(self, pipeline: "PipelineHere", model: StageModel, n_stages: int) -> None:
        self.inbox = FrameQueue[bytes | Event](1000)
        self.index = model.stage
        self.link = TransferLink(model.part.group, host="127.0.0.1") if n_stages > 1 else None
        self.pipeline = pipeline
        self.device = JaxStageDevice(
            model,
            self.link,
            post=self.put,
            address_before=lambda: pipeline.address_of(self.index - 1),
            memory_of=lambda worker: LocalMemory([worker], stored=MODEL, model=MODEL, dtype=jnp.dtype("f4")),
        )
        self.controller = Controller(
            model.stage, n_stages, lines=self, device=self.device, clock=time.monotonic
        )

    def put(self, item: bytes | Event) -> None:
        assert self.inbox.put(item)
        self.pipeline.woken.set()

    def go_on(self) -> None:
        while (item := self.inbox.get(0)) is not None:
            if isinstance(item, bytes):
                self.controller.take(item)
            else:
                item(self.controller)

    def connect(self, address: str) -> None:
        assert address == f"stage {self.index + 1}"

    def forward(self, data: bytes) -> None:
        self.pipeline.stages[self.index + 1].put(data)

    def report(self, data: bytes) -> None:
        self.pipeline.arrivals.append(Arrival(self.index, data))


class PipelineHere:
    """All stages of a model, and a Channel to them that lets them run while it waits."""

    def __init__(self, n_stages: int) -> None:
        self.arrivals = deque[Arrival]()
        self.woken = threading.Event()
        parts = split_model(MODEL, jax.devices(), ParallelConfig(pipeline_parallel=n_stages))
        whole = init_parameters(MODEL, jax.random.key(4), jnp.float32)
        self.stages = [
            StageHere(
                self,
                StageModel(
                    config=MODEL,
                    parameters=parameters,
                    part=part,
                    stage=stage,
                    n_devices=n_stages,
                ),
                n_stages,
            )
            for stage, (part, parameters) in enumerate(zip(parts, place(MODEL, whole, parts), strict=True))
        ]

    def address_of(self, stage: int) -> str:
        link = self.stages[stage].link
        assert link is not None
        return link.address

    def follow(self) -> list[str]:
        return [f"stage {stage}" for stage in range(len(self.stages))]

    def send(self, stage: int, data: bytes) -> None:
        self.stages[stage].put(data)

    def receive(self, timeout: float) -> Arrival | None:
        deadline = time.monotonic() + timeout
        while True:
            self.woken.clear()
            for stage in self.stages:
                stage.go_on()
            if self.arrivals:
                return self.arrivals.popleft()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.woken.wait(left)

    def close(self) -> None:
        for stage in self.stages:
            stage.device.close()


class Serving:
    """An engine of such stages with its scheduler."""

    def __init__(self, pipeline: PipelineHere) -> None:
        n_stages = len(pipeline.stages)
        shape = engine_shape(MODEL, SERVING, n_workers=n_stages)
        self.kv = kv_manager(shape)
        self.orders = [
            StartOrder(
                shape=shape, next_address=f"stage {stage + 1}", worker_seconds=30.0, ready_seconds=120.0
            )
            for stage in range(n_stages)
        ]
        self.workers = RemoteWorkers(pipeline, self.orders, clock=time.monotonic, deadlines=DEADLINES)
        self.engine = RemoteEngine(
            self.workers,
            self.kv,
            vocab_size=MODEL.vocab_size,
            n_workers=n_stages,
        )
        assert self.engine.recover(lambda: False)
        timeline = Timeline(time.monotonic)
        self.pool = RequestPool(
            max_waiting=100, on_arrival=timeline.arrived, on_deliveries=lambda deliveries: None
        )
        self.scheduler = Scheduler(self.pool, self.engine, self.kv, config=SERVING, timeline=timeline)

    def run(self, requests: list[Request], n_iterations: int | None = None) -> None:
        """Run to the end, or until this many iterations have returned tokens to the first request."""
        deadline = time.monotonic() + SOON
        while len(self.pool) and (n_iterations is None or len(requests[0].output_ids) < n_iterations):
            self.scheduler.step()
            assert time.monotonic() < deadline


@contextmanager
def serving(n_stages: int) -> Iterator[tuple[PipelineHere, Serving]]:
    pipeline = PipelineHere(n_stages)
    try:
        yield pipeline, Serving(pipeline)
    finally:
        pipeline.close()


def requests() -> list[Request]:
    rng = np.random.default_rng(3)
    return [
        greedy_request(str(i), rng.integers(0, MODEL.vocab_size, int(n)).tolist(), int(16 - n))
        for i, n in enumerate(rng.integers(1, 13, 9))
    ]


def assert_greedy(whole: Parameters, request: Request) -> int:
    """Check output tokens against the reference up to the first unsure choice; returns their number."""
    tokens = list(request.prompt_ids) + request.output_ids
    assert len(tokens) == request.max_tokens
    logits = np.asarray(reference.forward(MODEL, whole, jnp.array(tokens)))[len(request.prompt_ids) - 1 : -1]
    best = np.sort(logits, axis=-1)[:, -2:]
    unsure = np.flatnonzero(best[:, 1] - best[:, 0] < MARGIN)
    n_sure = int(unsure[0]) if len(unsure) else len(logits)
    assert request.output_ids[:n_sure] == logits.argmax(axis=-1)[:n_sure].tolist()
    return n_sure


def assert_all_greedy(batch: list[Request]) -> None:
    whole = init_parameters(MODEL, jax.random.key(4), jnp.float32)
    n_sure = sum(assert_greedy(whole, request) for request in batch)
    assert n_sure > 0.9 * sum(len(request.output_ids) for request in batch)


@pytest.mark.parametrize("n_stages", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 4))])
def test_the_tokens_are_right_and_nothing_compiles_once_it_is_up(n_stages: int) -> None:
    with serving(n_stages) as (_, engine):
        batch = requests()
        with compilations() as compiled:
            for request in batch:
                engine.pool.add(request)
            engine.run(batch)
        assert compiled == []
        assert_all_greedy(batch)
        # T x H x itemsize over each link, and nothing behind the last stage.
        stages = engine.workers.stages
        n_iterations = engine.workers.counters.messages
        deadline = time.monotonic() + SOON
        while any(stage.done < n_iterations for stage in stages[:-1]):  # the last may come after its tokens
            engine.workers.wait()
            assert time.monotonic() < deadline
        assert {stage.received for stage in stages} == {n_iterations}
        assert stages[-1].link_bytes == 0
        sizes = bucket_sizes(SERVING.max_batch_tokens)
        tokens = [bucket_for(record.n_tokens, sizes) for record in engine.scheduler.timeline.iterations]
        assert len(tokens) == n_iterations
        for stage in stages[:-1]:
            assert stage.link_bytes == sum(tokens) * MODEL.hidden_size * 4


def test_a_failing_stage_ends_the_epoch_and_the_next_one_has_new_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(2) as (pipeline, engine):
        batch = requests()
        for request in batch:
            engine.pool.add(request)
        engine.run(batch, n_iterations=2)
        worker = pipeline.stages[1].device._worker
        assert worker is not None

        def fails(*_: object) -> None:
            worker._caches = []  # what was donated is gone
            raise RuntimeError("no more memory")

        with monkeypatch.context() as failing:
            failing.setattr(worker, "forward", fails)
            with pytest.raises(WorkerLost, match=r"stage 2: .*memory") as lost:
                engine.run(batch)
        assert lost.value.stage == 1
        run_again(engine.scheduler)
        with compilations() as compiled:
            assert engine.engine.recover(lambda: False)
            engine.run(batch)
        assert compiled == [], "the programs were kept"
        assert_all_greedy(batch)


@pytest.mark.long
def test_other_sizes_get_other_programs_and_sizes_that_do_not_fit_are_reported() -> None:
    with serving(2) as (pipeline, engine):
        for n_blocks in (SERVING.n_blocks // 2, 1 << 28):
            other = [replace(order, shape=replace(order.shape, n_blocks=n_blocks)) for order in engine.orders]
            again = RemoteWorkers(
                pipeline, other, clock=time.monotonic, deadlines=DEADLINES, first_epoch=1 + n_blocks
            )
            if n_blocks < SERVING.n_blocks:
                assert again.recover(lambda: False)
                worker = pipeline.stages[0].device._worker
                assert worker is not None
                cache = worker._caches[0]
                assert isinstance(cache, LayerCache) and cache.keys.shape[0] == n_blocks
            else:
                with pytest.raises(WorkerLost, match=r"the keys and values of n_slots = 1073741824 take"):
                    again.recover(lambda: False)


@pytest.mark.long
def test_adapters_are_added_once_to_each_stage_s_weights_and_leave_no_trace(tmp_path: Path) -> None:
    """This also holds after the worker is recreated with other sizes."""
    rng = np.random.default_rng(0)
    given, added = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name in ("layers.0.up.weight", "layers.3.down.weight"):
        out, into = (24, 16) if "up" in name else (16, 24)
        a, b = (rng.standard_normal(shape).astype("f4") for shape in ((2, into), (out, 2)))
        given |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
        added[name] = 0.5 * b @ a
    write_adapters(tmp_path, given, 0.5)
    with serving(2) as (pipeline, engine):

        def weights() -> dict[str, np.ndarray]:
            stages = [stage.device._worker.stage for stage in pipeline.stages if stage.device._worker]
            pairs = (pair for stage in stages for pair in stage.parameters.items())
            return {name: np.array(value) for name, value in pairs}

        def change(epoch: int, **fields: Any) -> None:
            orders = [replace(order, **fields) for order in engine.orders]
            again = RemoteWorkers(
                pipeline, orders, clock=time.monotonic, deadlines=DEADLINES, first_epoch=epoch
            )
            assert again.recover(lambda: False)

        before = weights()
        adapted = {"adapters_version": 1, "adapters_directory": str(tmp_path)}
        smaller = {"shape": replace(engine.orders[0].shape, n_blocks=18)}
        for epoch, fields in ((10, adapted), (20, adapted | smaller)):
            change(epoch, **fields)
            for name, value in weights().items():
                wanted = before[name] + added.get(name, np.float32(0))
                np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6, err_msg=name)
                assert name in added or (value == before[name]).all()
        memories = [stage.device._memory for stage in pipeline.stages]
        kept = [[*memory._without_adapter] for memory in memories if isinstance(memory, LocalMemory)]
        assert kept == [["layers.0.up.weight"], ["layers.3.down.weight"]]
        change(30, **smaller)
        assert all((value == before[name]).all() for name, value in weights().items())
