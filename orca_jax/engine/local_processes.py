"""Worker processes on this machine: the supervisor's children, reached over private unix sockets."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orca_jax.config import EngineConfig
from orca_jax.engine.remote_pipeline import StageWorkers
from orca_jax.workers.environment import sets_memory, visible_gpus, worker_environment
from orca_jax.workers.supervisor import Supervisor, WorkerCommand
from orca_jax.workers.worker_options import WorkerOptions

_MODULE = "orca_jax.launch.worker_process"
_DEVICES = Path("/dev")


class WorkerProcesses:
    """One process for each stage of an engine.

    They listen on sockets in a directory that only this user can enter, so they need no secret. Raises
    ConfigError if the machine has too few GPUs.
    """

    same_machine = True

    def __init__(self, config: EngineConfig, *, on_event: Callable[[str], None]) -> None:
        stages, fraction = range(config.pipeline_parallel), config.memory_fraction
        gpus = visible_gpus(os.environ, [path.name for path in _DEVICES.glob("nvidia*")])
        environments = [
            worker_environment(stage, config, os.environ, gpus, memory_fraction=fraction) for stage in stages
        ]
        if gpus and not sets_memory(os.environ):  # the processes' environments set it; each may use all of it
            config = replace(config, memory_fraction=None)
        self._directory = Path(tempfile.mkdtemp(prefix="orca-"))  # mode 0700
        addresses = [f"unix:{self._directory}/{stage + 1}" for stage in stages]
        self._supervisor = Supervisor(
            [
                WorkerCommand(
                    worker_arguments(
                        WorkerOptions(stage=stage, engine=config, listen=address, end_with_stdin=True)
                    ),
                    environment,
                )
                for stage, address, environment in zip(stages, addresses, environments, strict=True)
            ],
            bound=config.restarts,
            on_event=on_event,
            # Shorter than the engine master's own wait, which begins before the process starts.
            patience_seconds=0.9 * config.deadlines.ready_seconds,
        )
        self.workers = StageWorkers(
            addresses=lambda: addresses,
            on_suspect=self._supervisor.restart,
            on_ready=self._supervisor.joined,
            failure=self._supervisor.failure,
            cause_of=self._supervisor.cause_of,
        )
        try:
            self._supervisor.start()
        except BaseException:
            self.close()
            raise

    def pids(self) -> list[int | None]:
        """The process ids, stage 1 first; None for a process that is being restarted."""
        return self._supervisor.pids()

    def close(self) -> None:
        self._supervisor.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def worker_arguments(options: WorkerOptions) -> tuple[str, ...]:
    """The command that runs a worker on this machine."""
    return (sys.executable, "-m", _MODULE, options.as_json())
