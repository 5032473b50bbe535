# pyright: standard
"""Composition: loads a found model into an engine whose workers all run in this process."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from orca_jax.aot.measured_device import measure_device
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import EngineConfig, ServingConfig
from orca_jax.engine.engine_master import BuiltEngine
from orca_jax.engine_memory import EngineMemory
from orca_jax.execution.capacity import check_weights
from orca_jax.execution.programs import OnProgram
from orca_jax.families.model_config import ModelConfig
from orca_jax.host_memory import keep_large_buffers
from orca_jax.iteration.shape import serving_buckets
from orca_jax.launch.adapter_library import AdapterLibrary, family_of, with_room_for_adapters
from orca_jax.launch.compile_process import DescribedEngine
from orca_jax.launch.disk_blocks import DiskBlocks
from orca_jax.launch.local_draft import MemoryWithDraft, draft_place, local_draft_engine
from orca_jax.launch.local_engine import build_engine, chosen_sizes
from orca_jax.launch.local_memory import LocalMemory
from orca_jax.launch.placed_adapters import placed_here
from orca_jax.launch.travelling_blocks import TravellingBlocks
from orca_jax.model.transformer import Parameters
from orca_jax.model_files.draft_model import find_draft_model
from orca_jax.model_files.found_model import FoundModel
from orca_jax.native.operations import build_all_ahead
from orca_jax.planning.block_costs import tier_costs
from orca_jax.planning.known_devices import gpu_like
from orca_jax.planning.sizes import nominal_rates
from orca_jax.planning.stage_layers import split_summary
from orca_jax.planning.stage_memory import StageRoom
from orca_jax.scheduling.tier_costs import TierCosts
from orca_jax.sharding.device_group import Device, default_dtype, device_name
from orca_jax.sharding.partition import StagePart, split_model
from orca_jax.sharding.random_parameters import random_parameters
from orca_jax.user_model.decoder import ModuleShapes
from orca_jax.user_model.find import module_shapes, user_stages
from orca_jax.workers.environment import compile_cache_folder


def load_stages(
    found: FoundModel,
    parts: Sequence[StagePart],
    config: EngineConfig,
    dtype: jnp.dtype,
    on_load: Callable[[int, int], None] | None = None,
) -> tuple[ModelConfig, Sequence[Parameters]]:
    """Load the weights of these stages onto their devices; return the padded model and each stage's weights.

    `ModelConfig.for_devices` says how the devices of a stage share the model; a user's model is split by its
    own specs. Raises ConfigError before loading if the weights do not fit, or a CheckpointError.
    """
    if found.user_model is not None:
        return found.config, user_stages(found.user_model, found.config, parts, dtype)
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
        state_shares=model.n_state_shares,
        packed=model.has_packed_experts,
        forms=model.weight_forms,
        placements=placements,
        on_bytes=on_load,
    )
    return model, checkpoint.stages


def shapes_of_module(found: FoundModel, config: EngineConfig, dtype: jnp.dtype) -> ModuleShapes | None:
    """The weights of a model that a user wrote; None for another model."""
    if found.user_model is None:
        return None
    return module_shapes(found.user_model, found.config, config.pipeline_parallel, dtype)


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
    config = with_room_for_adapters(found, config)
    devices = jax.devices()
    dtype = config.dtype or default_dtype(devices[0])
    draft = find_draft_model(found, config)
    found = replace(found, config=found.config.read_by(None if draft is None else draft.config))
    place = None if draft is None else draft_place(draft.name, draft.config, config, jnp.dtype(dtype))
    if devices[0].platform == "cpu":
        keep_large_buffers()
        build_all_ahead(
            found.config.head_size,
            config.block_size,
            dtype,
            kv_code=found.config.attention.kv_code,
            experts=found.config.kind_of_experts,
            value_size=found.config.attention.value_part,
            recurrent=bool(found.config.recurrences),
            linear_attention=found.config.has_linear_attention,
            steady=config.deterministic,
        )
    parts = split_model(found.config, devices, config)
    model, parameters = load_stages(found, parts, config, jnp.dtype(dtype), on_load)
    n_devices = config.n_devices
    serving, rooms = chosen_sizes(
        model,
        jnp.dtype(dtype),
        parts,
        config,
        n_devices=n_devices,
        attention=config.attention,
        draft=None if place is None else place.memory,
    )
    loaded = None
    if draft is not None and place is not None:
        loaded = local_draft_engine(
            draft,
            place,
            config,
            serving,
            model,
            parameters,
            rooms,
            jnp.dtype(dtype),
            on_program=on_program,
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
        described=None if draft is not None else _described(found, config, model, serving, jnp.dtype(dtype)),
        on_program=on_program,
    )
    drafter = None if loaded is None else loaded.engine
    if loaded is not None:
        loaded.read(built.workers.workers[-1], built.kv)
    adapters = None
    if serving.max_loras:
        adapters = AdapterLibrary(
            placed_here(built.workers.workers, model, jnp.dtype(dtype), serving.max_lora_rank),
            family_of(found),
            model,
            jnp.dtype(dtype),
            stored=found.config,
            max_rank=serving.max_lora_rank,
            extras=serving.lora_extras,
            host_bytes=config.lora_host_bytes,
        )
        adapters.add_all(config.adapters or {})
    later = built.later
    if built.kv.host is not None:
        built.kv.host.costs = _tier_costs(model, rooms, config, serving, jnp.dtype(dtype), devices[0])
    closing: list[Callable[[], None]] = [] if later is None else [later.close]
    if config.kv_disk is not None:
        closing.append(DiskBlocks(found, config, dtype, built.kv, built.workers.workers).close)
    if config.gives_blocks or config.takes_blocks:
        closing.append(TravellingBlocks(found, config, dtype, built.kv, built.workers.workers).close)
    memory: EngineMemory = LocalMemory(
        built.workers.workers,
        stored=found.config,
        model=model,
        dtype=jnp.dtype(dtype),
        module=shapes_of_module(found, config, jnp.dtype(dtype)),
    )
    if loaded is not None:
        memory = MemoryWithDraft(memory, loaded.engine, partial(loaded.share, built.workers.workers))
    return BuiltEngine(
        engine=built.engine,
        kv=built.kv,
        memory=memory,
        drafter=drafter,
        model=model,
        serving=serving,
        buckets=built.workers.sizes.buckets,
        dtype=dtype,
        device=device_name(devices[0]),
        stages=split_summary(model.n_layers, config) + ("" if draft is None else f", drafts by {draft.name}"),
        attention=built.attention,
        compile_later=None if later is None else later.start,
        adapters=adapters,
        close=partial(_close_all, closing),
    )


def _tier_costs(
    model: ModelConfig,
    rooms: Sequence[StageRoom],
    config: EngineConfig,
    serving: ServingConfig,
    dtype: jnp.dtype,
    device: Device,
) -> TierCosts | None:
    """The costs by which blocks are read or computed; None where nothing tells that reading is slower.

    A GPU computes at the rates of its data sheet, a CPU at the rates that it has now.
    """
    if device.platform != "cpu":
        name = device_name(device)
        rates, gpu = nominal_rates(name, dtype.itemsize), gpu_like(name)
        return tier_costs(model, rooms, config, serving, rates=rates, gpu=gpu)
    if not config.kv_bandwidths:
        return None
    return tier_costs(model, rooms, config, serving, rates=measure_device(dtype, repeat=3))


def _close_all(closing: Sequence[Callable[[], None]]) -> None:
    for close in closing:
        close()


def _described(
    found: FoundModel, config: EngineConfig, model: ModelConfig, serving: ServingConfig, dtype: jnp.dtype
) -> DescribedEngine | None:
    """Describe an engine without a draft model for a process that compiles its programs into the cache.

    None if there is no cache, and for what the description lacks: a user's layers, and adapters.
    """
    folder = compile_cache_folder(config.compile_cache, os.environ)
    if folder is None or found.user_model is not None or serving.max_loras:
        return None
    return DescribedEngine(
        model=model,
        serving=serving,
        parallel=config,
        dtype=dtype.name,
        attention=config.attention,
        cache=str(folder),
    )


def _may_be_ready_early(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether an engine may serve while programs are compiled.

    Not if outputs depend on each batch's bucket. On a GPU, which the caller excludes, XLA would autotune
    kernels in the memory that is left, while iterations disturb its measurements.
    """
    return config.ready_early and not config.deterministic and model.encoder is None
