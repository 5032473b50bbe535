"""The order that starts an epoch: the payload of START frames.

The engine master decides the engine's sizes. Each START carries them, so a worker cannot use others.
"""

import math
from dataclasses import asdict, dataclass, fields

from orca_jax.control import worker_pb2
from orca_jax.errors import BadFrame, ConfigError
from orca_jax.iteration.shape import EngineShape

MAX_ADDRESS = 1_000  # characters
MAX_DIRECTORY = 4_096
SLEEP_LEVELS = (0, 1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOrder:
    """The order to one stage to prepare for an epoch of an engine of this shape.

    `next_address` is the control address of the next stage's worker, "" for the last stage. A worker gives
    its device `worker_seconds` for an iteration or for new caches, or `ready_seconds` if it must compile
    programs or move weights first.

    A worker whose weights have another version than `weights_version` reads them from the checkpoint in
    `weights_directory`. Version 0, without a directory, is what it began with. Likewise it adds the adapters
    of another `adapters_version`, from `adapters_directory`, to these weights; those of version 0 are none.
    In an epoch with a `sleep_level` it has no caches, with level 2 no weights on its devices either, and runs
    no iteration.
    """

    shape: EngineShape
    next_address: str
    worker_seconds: float
    ready_seconds: float
    weights_version: int = 0
    weights_directory: str = ""
    sleep_level: int = 0
    adapters_version: int = 0
    adapters_directory: str = ""


def encode_start(order: StartOrder) -> worker_pb2.Start:
    """Encode the payload of START."""
    return worker_pb2.Start(
        shape=worker_pb2.Shape(**asdict(order.shape)),
        next_address=order.next_address,
        worker_seconds=order.worker_seconds,
        ready_seconds=order.ready_seconds,
        weights_version=order.weights_version,
        weights_directory=order.weights_directory,
        sleep_level=order.sleep_level,
        adapters_version=order.adapters_version,
        adapters_directory=order.adapters_directory,
    )


def decode_start(payload: worker_pb2.Start) -> StartOrder:
    """Decode the payload of START. Raises BadFrame."""
    address = payload.next_address
    if len(address) > MAX_ADDRESS or not address.isprintable():
        message = f"a start order's next_address is {address[:100]!r}; it must have up to {MAX_ADDRESS} "
        raise BadFrame(message + "printable characters")
    _check_directory("weights", payload.weights_directory, payload.weights_version)
    _check_directory("adapters", payload.adapters_directory, payload.adapters_version)
    if payload.sleep_level not in SLEEP_LEVELS:
        raise BadFrame(f"a start order's sleep_level is {payload.sleep_level}; it must be 0, 1 or 2")
    try:
        shape = EngineShape(
            **{field.name: getattr(payload.shape, field.name) for field in fields(EngineShape)}
        )
    except ConfigError as error:
        raise BadFrame(f"a start order's {error}") from error
    return StartOrder(
        shape=shape,
        next_address=address,
        worker_seconds=_seconds("worker_seconds", payload.worker_seconds),
        ready_seconds=_seconds("ready_seconds", payload.ready_seconds),
        weights_version=payload.weights_version,
        weights_directory=payload.weights_directory,
        sleep_level=payload.sleep_level,
        adapters_version=payload.adapters_version,
        adapters_directory=payload.adapters_directory,
    )


def _check_directory(kind: str, directory: str, version: int) -> None:
    if len(directory) > MAX_DIRECTORY or "\0" in directory or bool(directory) != bool(version):
        message = (
            f"a start order's {kind}_directory is {directory[:100]!r} and {kind}_version {version}; both "
        )
        raise BadFrame(
            message + f"must be set or neither, and a directory has up to {MAX_DIRECTORY} characters"
        )


def _seconds(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise BadFrame(f"a start order's {name} is {value!r}; it must be finite seconds above 0")
    return value
