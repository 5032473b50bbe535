# pyright: standard
"""Composition: an engine whose stages run in this process, in worker processes, or on other machines."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp

from orca_jax.config import EngineConfig
from orca_jax.engine.adapter_sender import AdapterSender
from orca_jax.engine.engine_master import BuiltEngine
from orca_jax.engine.local_processes import WorkerProcesses
from orca_jax.engine.remote_pipeline import (
    StageWorkers,
    StartWorkers,
    owned_pipeline,
    remote_pipeline,
    stage_terms,
)
from orca_jax.engine.remote_workers import RemoteEngine
from orca_jax.errors import ConfigError, OrcaError
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.launch.adapter_library import AdapterLibrary, family_of, with_room_for_adapters
from orca_jax.launch.loaded_engine import loaded_engine, shapes_of_module
from orca_jax.launch.placed_adapters import sent_to
from orca_jax.launch.remote_memory import RemoteMemory
from orca_jax.model_files.found_model import FoundModel, is_function


@dataclass(frozen=True, kw_only=True)
class Start(EngineConfig):
    """The options of an engine, and callbacks for the progress of its start.

    `on_load(done, total)` receives the bytes read of a checkpoint's files, `on_program(done, total, name)`
    each program that is compiled ahead, and `on_event(line)` a line for each event of a worker process and
    for each worker that is missing for long (docs/workers.md). `start_workers` starts the worker processes,
    by default on this machine.
    """

    on_load: Callable[[int, int], None] | None = None
    on_program: Callable[[int, int, str], object] | None = None
    on_event: Callable[[str], None] | None = None
    start_workers: StartWorkers | None = None


def start_engine(found: FoundModel, start: Start) -> BuiltEngine:
    """Start an engine for the model `found`. Raises ConfigError or a CheckpointError."""
    on_event = start.on_event or (lambda line: None)
    if found.user_model is not None and not (start.in_this_process or is_function(start.model)):
        raise ConfigError(
            "a worker process makes a model of your own itself; name the function that makes it, as in "
            "model='package.file:function', or leave workers and worker_processes out"
        )
    start = with_room_for_adapters(found, start)
    workers = start.workers
    if workers is not None:
        remote = StageWorkers(addresses=lambda: workers, secret=start.control_secret)
        built = remote_pipeline(found.name, found.config, start, remote, on_event=on_event)
        return _completed(built, found, start, remote, same_machine=False)
    config = EngineConfig.part_of(start)  # without the callbacks, which no other process can have
    if start.worker_processes:
        start_workers = start.start_workers or WorkerProcesses
        built, owned = owned_pipeline(found.name, found.config, config, start_workers, on_event=on_event)
        return _completed(built, found, config, owned.workers, same_machine=owned.same_machine)
    keep_compiled_programs(start.compile_cache)
    return loaded_engine(found, config, on_load=start.on_load, on_program=start.on_program)


def _completed(
    built: BuiltEngine, found: FoundModel, config: EngineConfig, workers: StageWorkers, *, same_machine: bool
) -> BuiltEngine:
    """An engine of worker processes with its memory and its adapters. Raises as `start_engine` does."""
    engine = built.engine
    assert isinstance(engine, RemoteEngine)
    memory = RemoteMemory(
        engine,
        model=found.config,
        dtype=built.dtype,
        same_machine=same_machine,
        module=shapes_of_module(found, config, jnp.dtype(built.dtype)),
    )
    built = replace(built, memory=memory)
    if not built.serving.max_loras:
        return built
    try:
        return _with_adapters(built, found, config, workers, engine)
    except OrcaError:
        built.close()
        raise


def _with_adapters(
    built: BuiltEngine, found: FoundModel, config: EngineConfig, workers: StageWorkers, engine: RemoteEngine
) -> BuiltEngine:
    n_devices, n_stages = built.devices_per_stage, engine.workers.n_stages
    if not n_devices or (n_devices > 1 and found.config.has_experts):
        why = "a mixture of experts" if n_devices else "stages with different numbers of devices"
        raise ConfigError(
            f"{why} over several devices takes no LoRA adapters yet; leave lora and max_loras out"
        )
    model = found.config.for_devices(n_devices)
    sender = AdapterSender(
        workers,
        stage_terms(found.name, found.config, n_stages, built.dtype),
        epoch=lambda: engine.workers.epoch,
        seconds=config.deadlines.ready_seconds,
    )
    adapters = AdapterLibrary(
        sent_to(engine.workers, sender, model),
        family_of(found),
        model,
        jnp.dtype(built.dtype),
        stored=found.config,
        max_rank=built.serving.max_lora_rank,
        extras=built.serving.lora_extras,
        host_bytes=config.lora_host_bytes,
        generation=lambda: engine.workers.epoch,
    )
    adapters.add_all(config.adapters or {})

    def close() -> None:
        sender.close()
        built.close()

    return replace(built, adapters=adapters, close=close)
