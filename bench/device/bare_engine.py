"""The engine inside `LLM`, in one process, without its thread, texts, grammars and remote workers.

It needs JAX, flax, numpy and this repository, but no libraries for tokenizers, grammars, control lines or
endpoints, which a machine with a GPU may lack.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import Attention, Dtype, ParallelConfig, Sizes
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.families.model_config import ModelConfig
from orca_jax.host_memory import keep_large_buffers
from orca_jax.iteration.shape import serving_buckets
from orca_jax.launch.local_engine import build_engine, chosen_sizes
from orca_jax.request.request import Request
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.sharding.device_group import default_dtype, device_name
from orca_jax.sharding.partition import split_model
from orca_jax.sharding.random_parameters import random_parameters

OnDeliveries = Callable[[Sequence[Delivery]], None]


class BareEngine:
    """An engine on the first devices of JAX, and schedulers for it.

    Weights come from `directory`, or are drawn from `seed`. `dtype` defaults to float32 on a CPU and bfloat16
    elsewhere. Sizes that are None are derived from the model and the memory, and `buckets` from the sizes.
    With `compile_ahead` the constructor compiles all programs. Raises ConfigError or a CheckpointError.
    """

    def __init__(
        self,
        model: ModelConfig,
        sizes: Sizes,
        *,
        directory: Path | None = None,
        dtype: Dtype | None = None,
        seed: int = 0,
        pipeline_parallel: int = 1,
        buckets: tuple[int, ...] | None = None,
        attention: Attention | None = None,
        compile_ahead: bool = False,
        compile_cache: str | None = None,
        on_program: Callable[[int, int, str], object] | None = None,
    ) -> None:
        cache: dict[str, Any] = {} if compile_cache is None else {"folder": compile_cache}
        keep_compiled_programs(**cache)
        devices = jax.devices()
        if devices[0].platform == "cpu":
            keep_large_buffers()
        self.model = model
        self.dtype: Dtype = dtype or default_dtype(devices[0])
        self.device = device_name(devices[0])
        self.n_stages = pipeline_parallel
        element = jnp.dtype(self.dtype)
        parts = split_model(model, devices, ParallelConfig(pipeline_parallel=pipeline_parallel))
        placements = [part.placement(model) for part in parts]
        if directory is None:
            self.parameters = [random_parameters(model, seed, element, place) for place in placements]
        else:
            loaded = load_checkpoint(directory, dtype=element, placements=placements)
            self.parameters = loaded.stages
        self.serving, _ = chosen_sizes(
            model, element, parts, sizes, n_devices=pipeline_parallel, attention=attention
        )
        self.buckets = buckets or serving_buckets(self.serving)
        built = build_engine(
            model,
            self.parameters,
            self.serving,
            parts,
            buckets=self.buckets,
            attention=attention,
            compile_ahead=compile_ahead,
            on_program=on_program,
        )
        self.kv, self.engine, self.workers = built.kv, built.engine, built.workers
        self.attention = built.attention

    def scheduler(
        self, *, on_deliveries: OnDeliveries = lambda deliveries: None, max_bs: int | None = None
    ) -> tuple[Scheduler, RequestPool]:
        """A fresh scheduler on this engine, and its pool; one at a time may have requests."""
        timeline = Timeline(time.perf_counter, bucket_sizes=self.buckets)
        pool = RequestPool(max_waiting=1 << 20, on_deliveries=on_deliveries, on_arrival=timeline.arrived)
        config = self.serving if max_bs is None else replace(self.serving, max_batch_size=max_bs)
        return Scheduler(pool, self.engine, self.kv, config=config, timeline=timeline), pool

    def run(self, requests: Sequence[Request]) -> Scheduler:
        """Run all requests at once to their end; return the scheduler that ran them."""
        scheduler, pool = self.scheduler()
        for request in requests:
            pool.add(request)
        while scheduler.step():
            pass
        return scheduler
