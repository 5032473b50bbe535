"""The actor of a stage: it runs the stage's worker as its child process, on whatever node Ray gives it."""

import os
import socket
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from orca_jax.config import EngineConfig
from orca_jax.control.handshake import ControlAddress
from orca_jax.engine.local_processes import worker_arguments
from orca_jax.workers.environment import sets_memory, visible_gpus, worker_environment
from orca_jax.workers.supervised_process import WorkerCommand
from orca_jax.workers.supervisor import Supervisor
from orca_jax.workers.worker_options import SECRET_VARIABLE, WorkerOptions

_MOST_EVENTS = 200  # that nobody has taken yet
_DEVICES = Path("/dev")
_NAME = "stage 1: "  # by which a supervisor of one process speaks of it


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStatus:
    """How a stage's actor is: its worker's address, what happened since the last time, and why it gave up."""

    address: str
    events: tuple[str, ...]
    failure: str | None


class StageActor:
    """One stage's worker, which is restarted at its address when it ends.

    When the actor itself dies, its worker ends with it, and Ray makes another actor, perhaps on another node:
    that one has another address.
    """

    def __init__(self, stage: int, config: EngineConfig) -> None:
        host = ray.util.get_node_ip_address()
        self._address = str(ControlAddress(host, _free_port(host)))
        self._events = deque[str](maxlen=_MOST_EVENTS)
        self._supervisor = Supervisor(
            [_worker_command(stage, config, self._address, host)],
            bound=config.restarts,
            on_event=lambda event: self._events.append(event.removeprefix(_NAME)),
            # As where the workers are on the engine master's machine.
            patience_seconds=0.9 * config.deadlines.ready_seconds,
        )
        self._supervisor.start()

    def status(self) -> StageStatus:
        """Where the worker is, and its events that were not taken yet."""
        events = tuple(self._events.popleft() for _ in range(len(self._events)))
        failure = self._supervisor.failure()
        why = None if failure is None else str(failure).removeprefix(_NAME)
        return StageStatus(address=self._address, events=events, failure=why)

    def restart(self) -> None:
        """As Supervisor.restart."""
        self._supervisor.restart(0)

    def joined(self) -> None:
        """As Supervisor.joined."""
        self._supervisor.joined(0)

    def whereabouts(self) -> tuple[int, int | None, str, str]:
        """The ids of the actor's process, of the worker's (None while that is restarted) and of the node, and
        the worker's address.
        """
        node = ray.get_runtime_context().get_node_id()
        return os.getpid(), self._supervisor.pids()[0], node, self._address

    def close(self) -> None:
        """End the worker within a few seconds."""
        self._supervisor.close()


def _worker_command(stage: int, config: EngineConfig, address: str, host: str) -> WorkerCommand:
    gpus = visible_gpus(os.environ, [path.name for path in _DEVICES.glob("nvidia*")])
    alone = replace(config, pipeline_parallel=1)  # Ray shows an actor the GPUs of its stage alone
    fraction = config.memory_fraction
    environment = worker_environment(0, alone, os.environ, gpus, memory_fraction=fraction)
    if gpus and not sets_memory(os.environ):  # the process's environment sets it
        config = replace(config, memory_fraction=None)
    options = WorkerOptions(
        stage=stage,
        engine=replace(config, control_secret=""),  # everybody may read a process's arguments
        listen=address,
        data_host=host,
        end_with_stdin=True,
    )
    environment[SECRET_VARIABLE] = config.control_secret
    return WorkerCommand(worker_arguments(options), environment)


def _free_port(host: str) -> int:
    """A port that was free just now; a worker that finds it taken ends, and says so."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]
