# pyright: standard
"""Composition: an engine whose stages run in this process, in worker processes, or on other machines."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from orca_jax.config import EngineConfig
from orca_jax.engine.engine_master import BuiltEngine
from orca_jax.engine.local_processes import WorkerProcesses
from orca_jax.engine.remote_pipeline import StageWorkers, StartWorkers, owned_pipeline, remote_pipeline
from orca_jax.engine.remote_workers import RemoteEngine
from orca_jax.errors import ConfigError
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.launch.loaded_engine import loaded_engine
from orca_jax.launch.remote_memory import RemoteMemory
from orca_jax.model_files.found_model import FoundModel


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
    if found.user_model is not None and not start.in_this_process:
        raise ConfigError("a user's model runs in this process; leave workers and worker_processes out")
    workers = start.workers
    if workers is not None:
        remote = StageWorkers(addresses=lambda: workers, secret=start.control_secret)
        built = remote_pipeline(found.name, found.config, start, remote, on_event=on_event)
        return _with_memory(built, found, same_machine=False)
    config = EngineConfig.part_of(start)  # without the callbacks, which no other process can have
    if start.worker_processes:
        start_workers = start.start_workers or WorkerProcesses
        built, owned = owned_pipeline(found.name, found.config, config, start_workers, on_event=on_event)
        return _with_memory(built, found, same_machine=owned.same_machine)
    keep_compiled_programs(start.compile_cache)
    return loaded_engine(found, config, on_load=start.on_load, on_program=start.on_program)


def _with_memory(built: BuiltEngine, found: FoundModel, *, same_machine: bool) -> BuiltEngine:
    engine = built.engine
    assert isinstance(engine, RemoteEngine)
    memory = RemoteMemory(engine, model=found.config, dtype=built.dtype, same_machine=same_machine)
    return replace(built, memory=memory)
