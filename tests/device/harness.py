"""An engine without `LLM` or server, on this thread: pool, scheduler, K/V manager, master, worker."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax

from orca_jax.config import Attention, ServingConfig
from orca_jax.execution.worker import Worker
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.shape import serving_buckets
from orca_jax.launch.local_engine import build_engine
from orca_jax.model.transformer import Parameters
from orca_jax.planning.sizes import engine_shape
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import admissible
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.scheduling.waiting_queue import waiting_queue
from orca_jax.sharding.partition import StagePart, split_model


@dataclass
class Harness:
    """One engine; `run` plays requests that arrive at given steps."""

    scheduler: Scheduler
    pool: RequestPool
    kv: KVManager
    deliveries: list[Delivery] = field(default_factory=list)

    def run(
        self,
        requests: Sequence[Request],
        arrivals: Sequence[int] | None = None,
        before_step: Callable[[int], None] = lambda step: None,
    ) -> dict[str, list[int]]:
        """Output tokens of each request id; `arrivals[i]` is the step before which request i is added."""
        waiting = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), strict=True))
        for step in range(100_000):
            while waiting and (waiting[0][0] <= step or len(self.pool) == 0):
                self.pool.add(requests[waiting.pop(0)[1]])
            before_step(step)
            if not self.scheduler.step() and not waiting:
                break
        assert len(self.pool) == 0 and self.scheduler.n_rsrv == 0
        assert self.kv.n_free_blocks == self.kv.n_blocks
        return {request.request_id: request.output_ids for request in requests}


def harness(
    model: ModelConfig,
    parameters: Parameters,
    serving: ServingConfig,
    *,
    buckets: Sequence[int] | None = None,
    attention: Attention | None = None,
    workers: Sequence[Worker] | None = None,
    parts: Sequence[StagePart] = (),
) -> Harness:
    """Build one, on one device unless `parts` say otherwise.

    `workers` handed in keep their compiled programs from case to case.
    """
    sizes = tuple(buckets or default_buckets(serving))
    parts = parts or split_model(model, jax.devices())
    engine, kv, *_ = build_engine(
        model,
        [] if workers else place(model, parameters, parts),
        serving,
        parts,
        buckets=sizes,
        attention=attention,
        workers=workers,
    )
    timeline = Timeline(time.monotonic, bucket_sizes=sizes)
    deliveries: list[Delivery] = []
    pool = RequestPool(
        max_waiting=serving.max_queue,
        check=lambda request: admissible(request, config=serving, model=model),
        on_arrival=timeline.arrived,
        on_deliveries=deliveries.extend,
        queue=waiting_queue(serving.scheduling),
    )
    return Harness(Scheduler(pool, engine, kv, config=serving, timeline=timeline), pool, kv, deliveries)


def default_buckets(serving: ServingConfig) -> tuple[int, ...]:
    """Buckets of an engine of these sizes."""
    return serving_buckets(serving)


def place(model: ModelConfig, parameters: Parameters, parts: Sequence[StagePart]) -> list[Parameters]:
    """Each stage's part of whole parameters."""
    return [
        {name: jax.device_put(parameters[name], sharding) for name, sharding in part.placement(model).items()}
        for part in parts
    ]


def single_worker(
    model: ModelConfig,
    parameters: Parameters,
    serving: ServingConfig,
    *,
    n_rows: int,
    attention: Attention | None = None,
) -> Worker:
    """The worker of an engine on one device."""
    (part,) = split_model(model, jax.devices())
    shape = replace(engine_shape(model, serving, n_workers=1), n_rows=n_rows)
    return Worker(model, parameters, shape, part, attention=attention)


def greedy_request(name: str, prompt: Sequence[int], n_output: int) -> Request:
    """A request for exactly `n_output` greedy tokens."""
    sampling = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True)
    return Request(name, tuple(prompt), len(prompt) + n_output, sampling, seed=0)


def finish_reasons(deliveries: Sequence[Delivery]) -> dict[str, FinishReason]:
    """Why each request ended; asserts that none ended twice."""
    ends = [(req.request_id, reason) for req, _, reason in deliveries if reason is not None]
    assert len(dict(ends)) == len(ends)
    return dict(ends)
