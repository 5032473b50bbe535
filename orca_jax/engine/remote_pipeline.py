"""Builds an engine from a pipeline of worker processes: the engine master joins them and brings them up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca_jax.config import EngineConfig
from orca_jax.control.frame import MAX_FRAME
from orca_jax.control.handshake import JoinTerms, model_digest
from orca_jax.control.message_wire import most_bytes
from orca_jax.control.start_order import StartOrder
from orca_jax.engine.built_engine import BuiltEngine
from orca_jax.engine.grpc_channel import ControlChannel
from orca_jax.engine.remote_engine import RemoteEngine
from orca_jax.engine.remote_workers import RemoteWorkers
from orca_jax.errors import ConfigError, EngineError, LossCause, OrcaError
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.known_devices import CPU
from orca_jax.planning.sizes import engine_shape, kv_manager, serving_config
from orca_jax.planning.stage_layers import check_split, split_summary, stage_layers
from orca_jax.planning.stage_memory import ITEMSIZE, StageRoom


def _nothing(_: int) -> None:
    """Ignore a stage."""


def _no_failure() -> None:
    """Workers that can always come up again."""


def _as_seen(_: int, seen: LossCause) -> LossCause:
    """The cause of a loss where nobody knows how processes end."""
    return seen


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWorkers:
    """The workers' addresses, and callbacks to their supervisor. Only `cause_of` may block, for seconds.

    `addresses` returns where their control ports are now, stage 1 first: a worker that comes back may be
    somewhere else, and until then its last address counts. `on_suspect` is called with a stage whose worker
    may need a restart, `on_ready` with a stage that is ready for a new epoch. `failure` says why the workers
    will never come up again. `cause_of` returns the cause of a loss, given the stage where it was noticed and
    the cause as far as it shows in what the workers sent.
    """

    addresses: Callable[[], Sequence[str]]
    secret: str = ""
    on_suspect: Callable[[int], None] = _nothing
    on_ready: Callable[[int], None] = _nothing
    failure: Callable[[], EngineError | None] = _no_failure
    cause_of: Callable[[int, LossCause], LossCause] = _as_seen


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
    n_stages = config.pipeline_parallel
    check_split(model, config)
    terms = [
        JoinTerms(
            model=name,
            digest=model_digest(model),
            dtype=config.dtype,
            stage=stage,
            n_stages=n_stages,
            first_layer=layers.start,
            n_layers=len(layers),
        )
        for stage, layers in enumerate(stage_layers(model.n_layers, n_stages))
    ]
    channel = ControlChannel(
        workers.addresses,
        terms,
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
    orders = [
        StartOrder(
            shape=shape,
            next_address="",  # set when it is sent
            worker_seconds=deadlines.worker_seconds,
            ready_seconds=deadlines.ready_seconds,
        )
        for _ in range(n_stages)
    ]
    remote = RemoteWorkers(
        channel,
        orders,
        clock=time.monotonic,
        deadlines=deadlines,
        first_epoch=time.time_ns(),  # above every epoch of an earlier engine master
        on_suspect=workers.on_suspect,
        on_ready=workers.on_ready,
        failure=workers.failure,
        cause_of=workers.cause_of,
    )
    kv = kv_manager(shape, prefix_caching=serving.scheduling.prefix_caching)
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
    )


def _distinct(texts: Sequence[str]) -> str:
    """The workers' texts, without repetitions."""
    return ", ".join(dict.fromkeys(texts))
