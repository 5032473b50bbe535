# pyright: standard
"""Composition: loads a model into an engine whose workers all run in this process."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import Attention, EngineConfig, ServingConfig, Sizes
from orca_jax.engine.engine_master import BuiltEngine, EngineMaster
from orca_jax.execution.capacity import check_slots, check_weights, stage_room
from orca_jax.execution.programs import OnProgram, compile_all
from orca_jax.execution.worker import LocalWorkers, Worker, all_programs
from orca_jax.families.model_config import ModelConfig
from orca_jax.host_memory import keep_large_buffers
from orca_jax.iteration.flat_batch import BatchSizes
from orca_jax.iteration.shape import serving_buckets
from orca_jax.launch.later_programs import LaterPrograms, first_buckets
from orca_jax.launch.local_memory import LocalMemory
from orca_jax.model.transformer import Parameters
from orca_jax.model_files.found_model import FoundModel
from orca_jax.native.operations import build_all_ahead
from orca_jax.planning.sizes import engine_shape, kv_manager, serving_config
from orca_jax.planning.stage_layers import split_summary
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.sharding.device_group import default_dtype, device_name
from orca_jax.sharding.partition import StagePart, split_model
from orca_jax.sharding.random_parameters import random_parameters
from orca_jax.user_model.find import own_stages


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


def load_stages(
    found: FoundModel,
    parts: Sequence[StagePart],
    config: EngineConfig,
    dtype: jnp.dtype,
    on_load: Callable[[int, int], None] | None = None,
) -> tuple[ModelConfig, Sequence[Parameters]]:
    """Load the weights of these stages onto their devices; return the padded model and each stage's weights.

    `ModelConfig.for_devices` says how the devices of a stage share the model. Raises ConfigError before
    loading if the weights do not fit, or a CheckpointError.
    """
    model = found.config.for_devices(len(parts[0].group))
    for part in parts:
        check_weights(model, dtype.itemsize, part, n_devices=config.n_devices)
    placements = [part.placement(model) for part in parts]
    if config.load_format == "dummy":
        return model, [random_parameters(model, config.seed or 0, dtype, each) for each in placements]
    assert found.directory is not None
    checkpoint = load_checkpoint(
        found.directory,
        dtype=dtype,
        vocab_multiple=model.vocab_multiple,
        kv_repeats=model.attention.kv_repeats,
        packed=model.has_packed_experts,
        linear_form=model.linear_form,
        placements=placements,
        on_bytes=on_load,
    )
    return model, checkpoint.stages


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


def loaded_engine(
    found: FoundModel,
    config: EngineConfig,
    *,
    on_load: Callable[[int, int], None] | None = None,
    on_program: OnProgram | None = None,
) -> BuiltEngine:
    """Load a model onto JAX's first devices.

    `on_load` receives the progress in bytes, and `on_program` each compiled program. Raises ConfigError or a
    CheckpointError.
    """
    devices = jax.devices()
    dtype = config.dtype or default_dtype(devices[0])
    if devices[0].platform == "cpu":
        keep_large_buffers()
        own = found.config
        build_all_ahead(
            own.head_size,
            config.block_size,
            dtype,
            experts=own.kind_of_experts,
            value_size=own.attention.value_part,
            steady=config.deterministic,
        )
    parts = split_model(found.config, devices, config)
    module = None
    if found.own is None:
        model, parameters = load_stages(found, parts, config, jnp.dtype(dtype), on_load)
    else:
        module = own_stages(found.own, found.config, parts, jnp.dtype(dtype))
        model, parameters = found.config, module
    n_devices = config.n_devices
    serving = chosen_sizes(
        model, jnp.dtype(dtype), parts, config, n_devices=n_devices, attention=config.attention
    )
    buckets = serving_buckets(serving)
    built = build_engine(
        model,
        parameters,
        serving,
        parts,
        buckets=buckets,
        attention=config.attention,
        compile_ahead=config.compile_ahead,
        ready_early=_may_be_ready_early(config, model) and devices[0].platform == "cpu",
        on_program=on_program,
    )
    later = built.later
    return BuiltEngine(
        engine=built.engine,
        kv=built.kv,
        memory=LocalMemory(
            built.workers.workers,
            stored=found.config,
            model=model,
            dtype=jnp.dtype(dtype),
            module=module,
        ),
        model=model,
        serving=serving,
        buckets=built.workers.sizes.buckets,
        dtype=dtype,
        device=device_name(devices[0]),
        stages=split_summary(model.n_layers, config),
        attention=built.attention,
        compile_later=None if later is None else later.start,
        close=(lambda: None) if later is None else later.close,
    )


def _may_be_ready_early(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether an engine may serve while programs are compiled.

    Not if outputs depend on each batch's bucket. On a GPU, which the caller excludes, XLA would autotune
    kernels in the memory that is left, while iterations disturb its measurements.
    """
    return config.ready_early and not config.deterministic and model.encoder is None
