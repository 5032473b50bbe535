# pyright: standard
"""Composition: compiles every program of a model's stages without its weights, and keeps them on disk."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from orca_jax.aot.compiled_stage import placed_parameters
from orca_jax.aot.memory_plan import alike_stages
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.execution.compile_counter import CompileCounter
from orca_jax.execution.programs import OnProgram, ToCompile, compile_all
from orca_jax.execution.worker import programs_by_stage, stage_workers
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.flat_batch import batch_sizes
from orca_jax.launch.local_draft import draft_place
from orca_jax.launch.local_engine import chosen_sizes
from orca_jax.model_files.draft_model import find_draft_config
from orca_jax.model_files.found_model import find_config
from orca_jax.planning.sizes import engine_shape
from orca_jax.sharding.device_group import default_dtype, device_name
from orca_jax.sharding.partition import StagePart, one_stage, split_model


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledModel:
    """The result of compiling ahead; `from_disk` counts the programs that were already on disk."""

    programs: int
    from_disk: int
    n_slots: int
    device: str
    folder: Path


def compile_model(
    model: str | Path | None = None,
    *,
    on_program: Callable[[int, int, str], object] | None = None,
    **arguments: Any,
) -> CompiledModel:
    """Call `compile_engine` with the keyword arguments of `orca_jax.LLM`."""
    return compile_engine(EngineConfig(model=model, **arguments), on_program=on_program)


def compile_engine(
    engine: EngineConfig, *, on_program: Callable[[int, int, str], object] | None = None
) -> CompiledModel:
    """Compile all programs of an engine for JAX's first devices.

    A preset's name needs no `load_format` here. With `worker_processes` each stage is compiled for the first
    devices, which is where its process will run it. A draft model's programs are compiled when it is loaded.
    Raises ConfigError or a CheckpointError.
    """
    cache = engine.compile_cache
    if cache is None:
        raise ConfigError(
            "compile_cache is none, so no program would be kept; name a folder, or leave it out"
        )
    if engine.workers is not None:
        raise ConfigError("remote workers compile their own programs; leave workers out")
    draft = find_draft_config(engine)
    found = find_config(engine.model, engine.load_format, engine.quantization, engine.kv_cache_dtype)
    found = found.read_by(draft)
    folder = keep_compiled_programs(cache)
    assert folder is not None
    devices, n_devices = jax.devices(), engine.n_devices
    element = jnp.dtype(engine.dtype or default_dtype(devices[0]))
    if engine.worker_processes:
        stages = range(engine.pipeline_parallel)
        parts = tuple(one_stage(found, devices, engine, stage) for stage in stages)
    else:
        parts = split_model(found, devices, engine)
    config = found.for_devices(len(parts[0].group))
    place = None if draft is None else draft_place(engine.speculative, draft, engine, element)
    serving, _ = chosen_sizes(
        config,
        element,
        parts,
        engine,
        n_devices=n_devices,
        attention=engine.attention,
        draft=None if place is None else place.memory,
    )
    shape = engine_shape(config, serving, n_workers=len(parts))
    placed = [placed_parameters(config, part, element) for part in parts]
    workers = stage_workers(config, placed, shape, parts, serving, attention=engine.attention, caches=False)
    programs = programs_by_stage(workers, batch_sizes(shape, workers[0].attention.kind))
    with closing(CompileCounter()) as counter:
        if engine.worker_processes:
            _compile_by_stage(config, parts, programs, cache, on_program)
        else:
            compile_all([program for stage in programs for program in stage], on_program)
        counts = counter.counts()
    return CompiledModel(
        programs=sum(map(len, programs)),
        from_disk=counts.from_disk,
        n_slots=serving.n_slots,
        device=device_name(devices[0]),
        folder=folder,
    )


def _compile_by_stage(
    model: ModelConfig,
    parts: Sequence[StagePart],
    programs: Sequence[Sequence[ToCompile]],
    cache: str | Path,
    on_program: OnProgram | None,
) -> None:
    """Compile each stage's programs into the folder of its process.

    A stage equal to an earlier one gets a copy of that stage's folder, which has its programs.
    """
    folders: list[Path] = []
    done, total = 0, sum(map(len, programs))
    for i, like in alike_stages(model, tuple(parts)):
        folder = keep_compiled_programs(cache, stage=(i, len(parts)))
        assert folder is not None
        folders.append(folder)
        if like < i:
            shutil.copytree(folders[like], folder, dirs_exist_ok=True)
        compile_all(programs[i], on_program and partial(_report, on_program, done, total))
        done += len(programs[i])
    keep_compiled_programs(cache)  # for this process's other programs


def _report(on_program: OnProgram, before: int, total: int, done: int, _: int, name: str) -> None:
    on_program(before + done, total, name)
