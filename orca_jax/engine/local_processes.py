"""Worker processes on this machine: the supervisor's children, reached over sockets that are theirs alone."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from orca_jax.config import Deadlines, RestartBound, WorkerOptions
from orca_jax.engine.built_engine import BuiltEngine
from orca_jax.engine.remote_pipeline import WorkersBehind, remote_pipeline
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.sizes import Sizes
from orca_jax.planning.stage_layers import check_split
from orca_jax.workers.environment import says_memory, visible_gpus, worker_environment
from orca_jax.workers.supervised_process import WorkerCommand
from orca_jax.workers.supervisor import Supervisor

_MODULE = "orca_jax.launch.worker_process"
_DEVICES = Path("/dev")


class WorkerProcesses:
    """A process for each of `options`, which are those of the stages in order; `listen` is filled in here.

    They listen on sockets in a directory that only this user can enter, so they need no secret. Raises
    ConfigError where the machine's GPUs are too few.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        bound: RestartBound,
        deadlines: Deadlines,
        on_event: Callable[[str], None],
    ) -> None:
        gpus = visible_gpus(os.environ, [path.name for path in _DEVICES.glob("nvidia*")])
        environments = [
            worker_environment(
                stage,
                options.n_stages,
                options.tensor_parallel,
                os.environ,
                gpus,
                memory_fraction=options.memory_fraction,
            )
            for stage in range(options.n_stages)
        ]
        if gpus and not says_memory(os.environ):  # each process holds that share, and may take all of it
            options = replace(options, memory_fraction=None)
        self._directory = Path(tempfile.mkdtemp(prefix="orca-"))  # mode 0700
        addresses = [f"unix:{self._directory}/{stage + 1}" for stage in range(options.n_stages)]
        self._supervisor = Supervisor(
            [
                WorkerCommand(_arguments(replace(options, stage=stage, listen=address)), environment)
                for stage, (address, environment) in enumerate(zip(addresses, environments, strict=True))
            ],
            bound=bound,
            on_event=on_event,
            # Below what the engine master waits, whose clock begins before the process does.
            patience_seconds=0.9 * deadlines.ready_seconds,
        )
        self.behind = WorkersBehind(
            addresses=tuple(addresses),
            on_suspect=self._supervisor.restart,
            on_ready=self._supervisor.joined,
            failure=self._supervisor.failure,
        )
        try:
            self._supervisor.start()
        except BaseException:
            self.close()
            raise

    def pids(self) -> list[int | None]:
        """The processes' ids, of stage 1 first; None for one that is between two lives."""
        return self._supervisor.pids()

    def close(self) -> None:
        """End all of them, within some seconds."""
        self._supervisor.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _arguments(options: WorkerOptions) -> tuple[str, ...]:
    said = asdict(replace(options, end_with_stdin=True))
    return (sys.executable, "-m", _MODULE, json.dumps(said))


def supervised_pipeline(
    name: str,
    model: ModelConfig,
    said: Sizes,
    options: WorkerOptions,
    *,
    restarts: RestartBound,
    deadlines: Deadlines,
    on_event: Callable[[str], None],
) -> BuiltEngine:
    """Start the worker processes, and bring a pipeline of them up; `close` of what it gives ends them.

    Raises as `remote_pipeline`; no process is left then.
    """
    check_split(model, pipeline_parallel=options.n_stages, tensor_parallel=options.tensor_parallel)
    processes = WorkerProcesses(options, bound=restarts, deadlines=deadlines, on_event=on_event)
    try:
        built = remote_pipeline(
            name,
            model,
            said,
            processes.behind,
            dtype=options.dtype,
            tensor_parallel=options.tensor_parallel,
            deadlines=deadlines,
            on_event=on_event,
        )
    except BaseException:
        processes.close()
        raise

    def close() -> None:
        built.close()
        processes.close()

    return replace(built, close=close)
