"""Places an engine's stages on a Ray cluster: the resources that they take, and an actor for each stage.

With `stage_actors` a replica has a placement group: bundle 0 for the engine master, and one for each stage,
maybe on other nodes. Ray restarts an actor that dies, and each actor its worker. The engine master recovers
as it does with other worker processes (docs/workers.md): it asks where the workers are, and begins another
epoch.
"""

import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orca_jax.config import EngineConfig, ParallelConfig
from orca_jax.control.handshake import ControlAddress
from orca_jax.engine.local_processes import worker_arguments
from orca_jax.engine.remote_pipeline import StageWorkers
from orca_jax.errors import ConfigError, EngineError
from orca_jax.workers.environment import sets_memory, visible_gpus, worker_environment
from orca_jax.workers.supervisor import Supervisor, WorkerCommand
from orca_jax.workers.worker_options import SECRET_VARIABLE, WorkerOptions
from server.ray.settings import ReplicaOptions

_MOST_EVENTS = 200  # of an actor, between two questions
_DEVICES = Path("/dev")
_NAME = "stage 1: "  # the prefix in a supervisor's messages about its only process
_LOOK_SECONDS = 0.25  # interval of questions to each actor
_CLOSE_SECONDS = 8.0  # for the actors to end their workers
_THREAD_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageNeeds:
    """The cores and GPUs that the actor of one stage takes."""

    cpus: float
    gpus: float


def _gpus_of(parallel: ParallelConfig, replicas: ReplicaOptions, cluster: Mapping[str, float]) -> float:
    """Return the GPUs of a replica: by default one for each device that it uses, if the cluster has GPUs."""
    if replicas.gpus_per_replica is not None:
        return replicas.gpus_per_replica
    return float(parallel.n_devices) if cluster.get("GPU") and parallel.workers is None else 0.0


def stage_needs(
    parallel: ParallelConfig, replicas: ReplicaOptions, cluster: Mapping[str, float]
) -> StageNeeds:
    """Return what each stage's actor takes: the cores of an engine master, and its share of the GPUs."""
    gpus = _gpus_of(parallel, replicas, cluster) / parallel.pipeline_parallel
    return StageNeeds(cpus=replicas.cpus_per_replica, gpus=gpus)


def replica_placement(
    parallel: ParallelConfig, replicas: ReplicaOptions, cluster: Mapping[str, float]
) -> dict[str, Any]:
    """Return the options of the engines' deployment; `cluster` has the resources of all nodes together.

    Raises ConfigError.
    """
    cpus, gpus = replicas.cpus_per_replica, _gpus_of(parallel, replicas, cluster)
    if not replicas.stage_actors:
        return {"ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus}}
    stage = stage_needs(parallel, replicas, cluster)
    if not cpus:
        raise ConfigError(
            "cpus_per_replica is 0; with stage_actors it must be above 0, because Ray has no empty bundle"
        )
    bundle = {"CPU": stage.cpus} | ({"GPU": stage.gpus} if stage.gpus else {})
    return {
        "ray_actor_options": {"num_cpus": cpus},
        "placement_group_bundles": [{"CPU": cpus}, *[bundle] * parallel.pipeline_parallel],
        "placement_group_strategy": replicas.stage_strategy,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class StageStatus:
    """An actor's answer: its worker's address, the events since the last answer, and why it gave up."""

    address: str
    events: tuple[str, ...]
    failure: str | None


class StageActor:
    """Runs one stage's worker as a child process, and restarts it at the same address when it ends.

    If the actor itself dies its worker ends too, and Ray makes another actor, maybe on another node and so
    with another address.
    """

    def __init__(self, stage: int, config: EngineConfig) -> None:
        host = ray.util.get_node_ip_address()
        self._address = str(ControlAddress(host, _free_port(host)))
        self._events = deque[str](maxlen=_MOST_EVENTS)
        self._supervisor = Supervisor(
            [_worker_command(stage, config, self._address, host)],
            bound=config.restarts,
            on_event=lambda event: self._events.append(event.removeprefix(_NAME)),
            # The same patience as with workers on the engine master's machine.
            patience_seconds=0.9 * config.deadlines.ready_seconds,
        )
        self._supervisor.start()

    def status(self) -> StageStatus:
        """Return the worker's address, and its events since the last call."""
        events = tuple(self._events.popleft() for _ in range(len(self._events)))
        failure = self._supervisor.failure()
        why = None if failure is None else str(failure).removeprefix(_NAME)
        return StageStatus(address=self._address, events=events, failure=why)

    def restart(self) -> None:
        """Restart the worker."""
        self._supervisor.restart(0)

    def joined(self) -> None:
        """Note that the worker has joined the engine."""
        self._supervisor.joined(0)

    def whereabouts(self) -> tuple[int, int | None, str, str]:
        """Return the ids of the actor's process, the worker's (None during a restart) and the node, and the
        worker's address.
        """
        node = ray.get_runtime_context().get_node_id()
        return os.getpid(), self._supervisor.pids()[0], node, self._address

    def close(self) -> None:
        """End the worker within seconds."""
        self._supervisor.close()


def _worker_command(stage: int, config: EngineConfig, address: str, host: str) -> WorkerCommand:
    gpus = visible_gpus(os.environ, [path.name for path in _DEVICES.glob("nvidia*")])
    alone = replace(config, pipeline_parallel=1)  # Ray shows an actor only the GPUs of its stage
    fraction = config.memory_fraction
    environment = worker_environment(0, alone, os.environ, gpus, memory_fraction=fraction)
    if gpus and not sets_memory(os.environ):  # the process's environment sets it
        config = replace(config, memory_fraction=None)
    options = WorkerOptions(
        stage=stage,
        engine=replace(config, control_secret=""),  # any user of the machine can read a process's arguments
        listen=address,
        data_host=host,
        end_with_stdin=True,
    )
    environment[SECRET_VARIABLE] = config.control_secret
    return WorkerCommand(worker_arguments(options), environment)


def _free_port(host: str) -> int:
    """Find a port that is free now; a worker that finds it taken ends with an error that says so."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


class StageActors:
    """The actors of all stages, from their start until `close`. An OwnedWorkers.

    Stage i (from 0) runs in bundle i + 1 of `group` and takes `needs`; the actors' names begin with `name`.
    If the process that made the actors dies, Ray ends them. Raises EngineError if they have not answered with
    their workers' addresses within `ready_seconds`.
    """

    same_machine = False

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_event: Callable[[str], None],
        needs: StageNeeds,
        group: PlacementGroup,
        name: str,
    ) -> None:
        self._on_event = on_event
        self._failure: EngineError | None = None
        self._closing = threading.Event()
        self._closed = False
        self._addresses = [""] * config.pipeline_parallel
        self._away: set[int] = set()  # stages whose actor Ray is restarting
        secret = secrets.token_hex(32)
        actors = ray.remote(StageActor)
        self._actors: list[Any] = [
            actors.options(
                name=f"{name} stage {stage + 1}",
                num_cpus=needs.cpus,
                num_gpus=needs.gpus,
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=stage + 1
                ),
            ).remote(stage, replace(config, control_secret=secret))
            for stage in range(len(self._addresses))
        ]
        self.workers = StageWorkers(
            addresses=lambda: tuple(self._addresses),
            secret=secret,
            on_suspect=partial(self._call, "restart"),
            on_ready=partial(self._call, "joined"),
            failure=lambda: self._failure,
        )
        self._thread = threading.Thread(target=self._run, name="orca-stage-actors", daemon=True)
        self._thread.start()
        try:
            self._wait_placed(config.deadlines.ready_seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all actors and their workers within a few seconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._thread.join(_THREAD_SECONDS)
        with suppress(RayError):
            ends = [actor.close.remote() for actor in self._actors]
            ray.wait(ends, num_returns=len(ends), timeout=_CLOSE_SECONDS)
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor, no_restart=True)

    def _call(self, what: str, stage: int) -> None:
        """Call an actor's method without waiting. A call lost with its actor is not repeated."""
        with suppress(RayError):
            getattr(self._actors[stage], what).remote()

    def _wait_placed(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while missing := [stage for stage, address in enumerate(self._addresses) if not address]:
            if self._failure is not None:
                raise self._failure
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"the actor of stage {missing[0] + 1} did not start within {seconds:g} seconds; the "
                    "cluster may have no node for its bundle"
                )
            time.sleep(_LOOK_SECONDS)

    # The following run on the thread that asks the actors.

    def _run(self) -> None:
        asked = dict[int, Any]()  # unanswered questions by stage
        try:
            while not self._closing.wait(_LOOK_SECONDS):
                for stage, actor in enumerate(self._actors):
                    if stage not in asked:
                        asked[stage] = actor.status.remote()
                answered, _ = ray.wait([*asked.values()], num_returns=len(asked), timeout=_LOOK_SECONDS)
                for stage in [stage for stage, answer in asked.items() if answer in answered]:
                    self._take(stage, asked.pop(stage))
        except Exception as error:  # any failure must reach the engine
            if not self._closing.is_set():
                self._fail(f"the actors of the stages cannot be asked: {type(error).__name__}: {error}")

    def _take(self, stage: int, answer: Any) -> None:
        name = f"stage {stage + 1}"
        try:
            status: StageStatus = ray.get(answer)
        except ActorDiedError as error:  # for good
            self._fail(f"{name}: its actor died, and Ray does not restart it: {error}")
            return
        except RayActorError as error:
            if stage not in self._away:
                self._away.add(stage)
                self._emit(f"{name}: its actor is away, and Ray restarts it: {' '.join(str(error).split())}")
            return
        if status.address != self._addresses[stage]:
            self._addresses[stage] = status.address
            self._emit(f"{name}: its actor runs the worker at {status.address}")
        self._away.discard(stage)
        for event in status.events:
            self._emit(f"{name}, in its actor: {event}")
        if status.failure is not None:
            self._fail(f"{name}: {status.failure}")

    def _fail(self, why: str) -> None:
        if self._failure is None:
            self._failure = EngineError(why)

    def _emit(self, event: str) -> None:
        with suppress(Exception):  # the workers go on
            self._on_event(event)
