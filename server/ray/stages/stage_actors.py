"""An engine whose stages are actors of Ray, each in a bundle of its replica's placement group.

Ray restarts an actor that dies, and each actor its worker. The engine master's part of a recovery is as with
other worker processes (docs/workers.md): it asks where the workers are, and begins another epoch.
"""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orca_jax.config import EngineConfig
from orca_jax.engine.remote_pipeline import StageWorkers
from orca_jax.errors import EngineError
from server.ray.stages.placement import StageNeeds
from server.ray.stages.stage_actor import StageActor, StageStatus

_LOOK_SECONDS = 0.25  # interval of questions to each actor
_CLOSE_SECONDS = 8.0  # for the actors to end their workers
_THREAD_SECONDS = 5.0


class StageActors:
    """The actors of all stages, from their start until `close`. An OwnedWorkers.

    Stage i (from 0) runs in bundle i + 1 of `group`, and takes what a stage `needs`; `name` begins the
    actors' names. They belong to the process that made them: if that dies, Ray ends them. Raises EngineError
    if they do not say where their workers are within `ready_seconds`.
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
        self._away: set[int] = set()  # stages whose actor was reported to be away
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
            on_suspect=partial(self._tell, "restart"),
            on_ready=partial(self._tell, "joined"),
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

    def _tell(self, what: str, stage: int) -> None:
        """Call an actor's method without waiting; if the actor is away, the next one need not hear of it."""
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

    # On the thread that asks the actors.

    def _run(self) -> None:
        asked = dict[int, Any]()  # what each stage was asked and did not answer yet
        try:
            while not self._closing.wait(_LOOK_SECONDS):
                for stage, actor in enumerate(self._actors):
                    if stage not in asked:
                        asked[stage] = actor.status.remote()
                answered, _ = ray.wait([*asked.values()], num_returns=len(asked), timeout=_LOOK_SECONDS)
                for stage in [stage for stage, answer in asked.items() if answer in answered]:
                    self._take(stage, asked.pop(stage))
        except Exception as error:  # the engine must learn of any failure
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
