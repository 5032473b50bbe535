"""A pipeline of workers in processes of their own: how an engine master reaches them and brings them up."""

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
from orca_jax.errors import ConfigError, EngineError, OrcaError
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.known_devices import CPU
from orca_jax.planning.sizes import engine_shape, kv_manager, serving_config
from orca_jax.planning.stage_layers import check_split, split_summary, stage_layers
from orca_jax.planning.stage_memory import ITEMSIZE, StageRoom


def _nothing(_: int) -> None:
    """Nobody wants to be told."""


def _no_failure() -> None:
    """None that anybody knows of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWorkers:
    """Where the workers are, and who looks after their processes.

    `addresses` are their control ports, of stage 1 first; `on_suspect` and `on_ready` are told a stage that
    cannot be relied on any more, and one that is ready for a new epoch; `failure` says why workers will never
    come up again.
    """

    addresses: tuple[str, ...]
    secret: str = ""
    on_suspect: Callable[[int], None] = _nothing
    on_ready: Callable[[int], None] = _nothing
    failure: Callable[[], EngineError | None] = _no_failure


def remote_pipeline(
    name: str,
    model: ModelConfig,
    config: EngineConfig,
    workers: StageWorkers,
    *,
    on_event: Callable[[str], None],
) -> BuiltEngine:
    """Join all workers and bring their first epoch up; `name` is the model's.

    Without a dtype in `config` theirs is taken. `on_event` is told whom it waits for, when that takes long.

    Raises ConfigError (WorkerRefused, WorkerUnreachable) for workers that do not fit, and EngineError where
    they do not come up; nothing is left joined then.
    """
    n_stages = config.parallel.pipeline_parallel
    assert n_stages == len(workers.addresses)
    check_split(model, config.parallel)
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
    n_stages, deadlines = config.parallel.pipeline_parallel, config.deadlines
    about = channel.about
    dtypes = [one.dtype for one in about]
    if len(set(dtypes)) > 1:
        message = f"the workers have different dtypes, {', '.join(dtypes)}; start all with the same --dtype"
        raise ConfigError(message)
    layers = stage_layers(model.n_layers, n_stages)
    rooms = [
        StageRoom(
            layers=own,
            n_devices=one.n_devices,
            itemsize=ITEMSIZE[one.dtype],
            attention=one.path,
            free=one.room,
            modest=one.modest,
        )
        for own, one in zip(layers, about, strict=True)
    ]
    on_cpu = all(one.device == CPU for one in about)
    serving = serving_config(model, config.sizes, rooms, coarse_buckets=not on_cpu)
    shape = engine_shape(model, serving, n_workers=n_stages)
    if most_bytes(shape) > MAX_FRAME:
        message = (
            f"max_batch_size is {serving.max_batch_size} and max_batch_tokens {serving.max_batch_tokens}; "
        )
        message += f"with this model an iteration may need {most_bytes(shape)} bytes on the control plane, "
        raise ConfigError(message + f"and {MAX_FRAME} are allowed, so lower one of them")
    orders = [
        StartOrder(
            shape=shape,
            next_address=next_address,
            worker_seconds=deadlines.worker_seconds,
            ready_seconds=deadlines.ready_seconds,
        )
        for next_address in (*workers.addresses[1:], "")
    ]
    remote = RemoteWorkers(
        channel,
        orders,
        clock=time.monotonic,
        deadlines=deadlines,
        first_epoch=time.time_ns(),  # above every epoch of an engine master before this one
        on_suspect=workers.on_suspect,
        on_ready=workers.on_ready,
        failure=workers.failure,
    )
    kv = kv_manager(shape)
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
        device=_all_of([one.device for one in about]),
        stages=f"{split_summary(model.n_layers, config.parallel)}, in processes of their own",
        attention=_all_of([one.attention for one in about]),
        close=channel.close,
    )


def _all_of(said: Sequence[str]) -> str:
    """What the workers say of themselves, once where all say the same."""
    return ", ".join(dict.fromkeys(said))
