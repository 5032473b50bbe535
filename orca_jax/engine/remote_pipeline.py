"""Builds an engine from a pipeline of worker processes: the engine master joins them and brings them up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from orca_jax.config import EngineConfig
from orca_jax.control.frame import MAX_FRAME
from orca_jax.control.handshake import JoinTerms, model_digest
from orca_jax.control.message_wire import most_bytes
from orca_jax.control.start_order import StartOrder
from orca_jax.engine.engine_master import BuiltEngine
from orca_jax.engine.grpc_channel import ControlChannel
from orca_jax.engine.remote_workers import RemoteEngine, RemoteWorkers, Supervision
from orca_jax.errors import ConfigError, OrcaError
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.known_devices import CPU
from orca_jax.planning.sizes import engine_shape, kv_manager, serving_config
from orca_jax.planning.stage_layers import check_split, split_summary, stage_layers
from orca_jax.planning.stage_memory import ITEMSIZE, StageRoom


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWorkers(Supervision):
    """The workers' addresses and secret, and callbacks to their supervisor.

    `addresses` returns where their control ports are now, stage 1 first: a worker that comes back may be
    somewhere else, and until then its last address counts.
    """

    addresses: Callable[[], Sequence[str]]
    secret: str = ""


def remote_pipeline(
    name: str,
    model: ModelConfig,
    config: EngineConfig,
    workers: StageWorkers,
    *,
    on_event: Callable[[str], None],
) -> BuiltEngine:
    """Join all workers and start their first epoch; `name` is the model's name.

    If `config` has no dtype, the workers' dtype applies. During a long wait `on_event` receives the missing
    workers.

    Raises ConfigError (WorkerRefused, WorkerUnreachable) for workers that do not match, and EngineError if
    they do not come up; both close all lines.
    """
    check_split(model, config)
    channel = ControlChannel(
        workers.addresses,
        stage_terms(name, model, config.pipeline_parallel, config.dtype),
        secret=workers.secret,
        seconds=config.deadlines.ready_seconds,
        failure=workers.failure,
        on_wait=on_event,
    )
    try:
        return _pipeline(model, config, workers, channel)
    except OrcaError:
        channel.close()
        raise


def stage_terms(name: str, model: ModelConfig, n_stages: int, dtype: str | None) -> list[JoinTerms]:
    """The terms on which the lines to each stage's worker join; `name` is the model's name."""
    return [
        JoinTerms(
            model=name,
            digest=model_digest(model),
            dtype=dtype,
            stage=stage,
            n_stages=n_stages,
            first_layer=layers.start,
            n_layers=len(layers),
        )
        for stage, layers in enumerate(stage_layers(model.n_layers, n_stages))
    ]


def _pipeline(
    model: ModelConfig, config: EngineConfig, workers: StageWorkers, channel: ControlChannel
) -> BuiltEngine:
    n_stages, deadlines = config.pipeline_parallel, config.deadlines
    about = channel.about
    dtypes = [worker.dtype for worker in about]
    if len(set(dtypes)) > 1:
        message = f"the workers have different dtypes, {', '.join(dtypes)}; start all with the same --dtype"
        raise ConfigError(message)
    layers = stage_layers(model.n_layers, n_stages)
    rooms = [
        StageRoom(
            layers=stage,
            n_devices=worker.n_devices,
            itemsize=ITEMSIZE[worker.dtype],
            attention=worker.path,
            free=worker.room,
            modest=worker.modest,
        )
        for stage, worker in zip(layers, about, strict=True)
    ]
    on_cpu = all(worker.device == CPU for worker in about)
    serving = serving_config(model, config, rooms, coarse_buckets=not on_cpu, device=about[0].device)
    shape = engine_shape(model, serving, n_workers=n_stages)
    if most_bytes(shape) > MAX_FRAME:
        message = (
            f"max_batch_size is {serving.max_batch_size} and max_batch_tokens {serving.max_batch_tokens}; "
        )
        message += f"with this model an iteration may need {most_bytes(shape)} bytes on the control plane, "
        raise ConfigError(message + f"but {MAX_FRAME} are allowed; lower one of them")
    order = StartOrder(
        shape=shape,
        next_address="",  # set when it is sent
        worker_seconds=deadlines.worker_seconds,
        ready_seconds=deadlines.ready_seconds,
    )
    remote = RemoteWorkers(
        channel,
        [order] * n_stages,
        clock=time.monotonic,
        deadlines=deadlines,
        first_epoch=time.time_ns(),  # above every epoch of an earlier engine master
        supervision=workers,
    )
    kv = kv_manager(shape, serving.scheduling)
    engine = RemoteEngine(remote, kv, vocab_size=model.vocab_size, n_workers=n_stages)
    up = engine.recover(lambda: False)
    assert up, "nothing interrupts it"
    return BuiltEngine(
        engine=engine,
        kv=kv,
        model=model,
        serving=serving,
        buckets=shape.buckets,
        dtype=dtypes[0],
        device=_distinct([worker.device for worker in about]),
        stages=f"{split_summary(model.n_layers, config)}, each in its own process",
        attention=_distinct([worker.attention for worker in about]),
        close=channel.close,
        devices_per_stage=rooms[0].n_devices if len({room.n_devices for room in rooms}) == 1 else 0,
    )


def _distinct(texts: Sequence[str]) -> str:
    """The workers' texts, without repetitions."""
    return ", ".join(dict.fromkeys(texts))


class OwnedWorkers(Protocol):
    """Worker processes, one for each stage, and what restarts them. `same_machine`: they run here."""

    same_machine: bool
    workers: StageWorkers

    def close(self) -> None:
        """End all processes within a few seconds."""
        ...


class StartWorkers(Protocol):
    """Starts the worker processes of an engine. Raises ConfigError or EngineError."""

    def __call__(self, config: EngineConfig, *, on_event: Callable[[str], None]) -> OwnedWorkers:
        """See the class; `on_event` receives a line for each event of a process."""
        ...


def owned_pipeline(
    name: str,
    model: ModelConfig,
    config: EngineConfig,
    start: StartWorkers,
    *,
    on_event: Callable[[str], None],
) -> tuple[BuiltEngine, OwnedWorkers]:
    """Start the worker processes and bring up their pipeline; the engine's `close` ends them.

    Raises as `start` and `remote_pipeline` do, after ending all processes.
    """
    check_split(model, config)
    owned = start(config, on_event=on_event)
    try:
        built = remote_pipeline(name, model, config, owned.workers, on_event=on_event)
    except BaseException:
        owned.close()
        raise

    def close() -> None:
        built.close()
        owned.close()

    return replace(built, close=close), owned
