# pyright: standard
"""Composition: builds an engine of weights in memory, whose workers all run in this process."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from orca_jax.config import Attention, ServingConfig, Sizes
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.execution.capacity import check_slots, stage_room
from orca_jax.execution.programs import OnProgram, compile_all
from orca_jax.execution.worker import LocalWorkers, Worker, all_programs
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.flat_batch import BatchSizes
from orca_jax.launch.later_programs import LaterPrograms, first_buckets
from orca_jax.model.transformer import Parameters
from orca_jax.planning.sizes import engine_shape, kv_manager, serving_config
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.sharding.device_group import device_name
from orca_jax.sharding.partition import StagePart


def chosen_sizes(
    config: ModelConfig,
    dtype: jnp.dtype,
    parts: Sequence[StagePart],
    sizes: Sizes,
    *,
    n_devices: int,
    attention: Attention | None = None,
) -> ServingConfig:
    """The sizes of an engine of these stages: those in `sizes`, and defaults that fit for the rest.

    The other arguments are as in `stage_room`. Raises ConfigError if `sizes` do not fit.
    """
    rooms = [
        stage_room(
            config,
            dtype,
            part,
            n_devices=n_devices,
            block_size=sizes.block_size,
            attention=attention,
            memory_fraction=sizes.memory_fraction,
        )
        for part in parts
    ]
    device = parts[0].group.devices[0]
    on_cpu = device.platform == "cpu"
    serving = serving_config(config, sizes, rooms, coarse_buckets=not on_cpu, device=device_name(device))
    shape = engine_shape(config, serving, n_workers=len(parts))
    for room in rooms:
        check_slots(config, room, shape, n_devices=n_devices)
    return serving


class LocalEngine(NamedTuple):
    """An engine, the K/V manager of its caches, a description of its attention, its workers, and the programs
    that can be compiled while it serves.
    """

    engine: EngineMaster
    kv: KVManager
    attention: str
    workers: LocalWorkers
    later: LaterPrograms | None = None


def build_engine(
    model: ModelConfig,
    parameters: Sequence[Parameters],
    serving: ServingConfig,
    parts: Sequence[StagePart],
    *,
    buckets: Sequence[int] | None = None,
    attention: Attention | None = None,
    workers: Sequence[Worker] | None = None,
    compile_ahead: bool = False,
    ready_early: bool = False,
    on_program: OnProgram | None = None,
) -> LocalEngine:
    """Build an engine with a worker for each of `parts` and its `parameters`. Raises ConfigError.

    `buckets`, ascending, replace the default buckets of `serving`. `attention` is passed to the workers.
    `workers` of the same model, parts and sizes may be reused once no engine uses them: they keep their
    compiled programs and their attention. With `compile_ahead` every program is compiled now and reported to
    `on_program`; otherwise each is compiled on first use. With `ready_early` as well, the programs of a few
    buckets are compiled now, and those of the others once the result's `later` is started.
    """
    n_workers = len(parts)
    shape = engine_shape(model, serving, n_workers=n_workers)
    kv = kv_manager(shape, prefix_caching=serving.scheduling.prefix_caching)
    if workers is None:
        workers = [
            Worker(
                model,
                own,
                shape,
                part,
                command_buffer_collectives=serving.command_buffer_collectives,
                attention=attention,
                caches=not compile_ahead,  # leaves their memory to XLA's autotuning during compilation
            )
            for part, own in zip(parts, parameters, strict=True)
        ]
    buckets = shape.buckets if buckets is None else tuple(buckets)
    ready_early &= compile_ahead
    sizes = BatchSizes(shape, first_buckets(buckets, shape.max_rows) if ready_early else buckets)
    if compile_ahead:
        compile_all(all_programs(workers, sizes), on_program)
        for worker in workers:
            worker.renew()
    local = LocalWorkers(workers, sizes)
    engine = EngineMaster(local, kv, vocab_size=model.vocab_size, n_workers=n_workers)
    later = LaterPrograms(local, shape, buckets) if ready_early else None
    return LocalEngine(engine, kv, workers[0].description, local, later)
