# pyright: standard
"""Composition: an engine whose stages run in this process, in worker processes, or on other machines."""

from collections.abc import Callable
from dataclasses import replace

from orca_jax.config import EngineConfig
from orca_jax.engine.built_engine import BuiltEngine
from orca_jax.engine.local_processes import WorkerProcesses
from orca_jax.engine.owned_pipeline import StartWorkers, owned_pipeline
from orca_jax.engine.remote_engine import RemoteEngine
from orca_jax.engine.remote_pipeline import StageWorkers, remote_pipeline
from orca_jax.errors import ConfigError
from orca_jax.execution.compile_cache import keep_compiled_programs
from orca_jax.execution.programs import OnProgram
from orca_jax.launch.loaded_engine import loaded_engine
from orca_jax.launch.remote_memory import RemoteMemory
from orca_jax.model_files.found_model import FoundModel


def start_engine(
    found: FoundModel,
    config: EngineConfig,
    *,
    on_load: Callable[[int, int], None] | None,
    on_program: OnProgram | None,
    on_event: Callable[[str], None] | None,
    start_workers: StartWorkers | None = None,
) -> BuiltEngine:
    """Start an engine as `config` describes; `found` is its model. Raises ConfigError or a CheckpointError.

    `on_load` and `on_program` receive the progress in this process, `on_event` events of worker processes,
    which `start_workers` starts where `config` has them, by default on this machine.
    """
    on_event = on_event or _ignore
    if found.own is not None and not config.in_this_process:
        raise ConfigError("a model of one's own runs in this process; leave workers and worker_processes out")
    workers = config.workers
    if workers is not None:
        remote = StageWorkers(addresses=lambda: workers, secret=config.control_secret)
        built = remote_pipeline(found.name, found.config, config, remote, on_event=on_event)
        return _with_memory(built, found, same_machine=False)
    if config.worker_processes:
        start = start_workers or WorkerProcesses
        built, owned = owned_pipeline(found.name, found.config, config, start, on_event=on_event)
        return _with_memory(built, found, same_machine=owned.same_machine)
    keep_compiled_programs(config.compile_cache)
    return loaded_engine(found, config, on_load=on_load, on_program=on_program)


def _ignore(_: str) -> None:
    pass


def _with_memory(built: BuiltEngine, found: FoundModel, *, same_machine: bool) -> BuiltEngine:
    engine = built.engine
    assert isinstance(engine, RemoteEngine)
    memory = RemoteMemory(engine, model=found.config, dtype=built.dtype, same_machine=same_machine)
    return replace(built, memory=memory)
