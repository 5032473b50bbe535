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
    `weights_directory`. Version 0, without a directory, is what it began with. In an epoch with a
    `sleep_level` it has no caches, with level 2 no weights on its devices either, and runs no iteration.
    """

    shape: EngineShape
    next_address: str
    worker_seconds: float
    ready_seconds: float
    weights_version: int = 0
    weights_directory: str = ""
    sleep_level: int = 0


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
    )


def decode_start(payload: worker_pb2.Start) -> StartOrder:
    """Decode the payload of START. Raises BadFrame."""
    address = payload.next_address
    if len(address) > MAX_ADDRESS or not address.isprintable():
        message = f"a start order's next_address is {address[:100]!r}; it must have up to {MAX_ADDRESS} "
        raise BadFrame(message + "printable characters")
    directory = payload.weights_directory
    if (
        len(directory) > MAX_DIRECTORY
        or "\0" in directory
        or bool(directory) != bool(payload.weights_version)
    ):
        message = f"a start order has weights_directory {directory[:100]!r} and weights_version "
        message += f"{payload.weights_version}; both must be set or neither, and the directory has up to "
        raise BadFrame(message + f"{MAX_DIRECTORY} characters")
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
        weights_directory=directory,
        sleep_level=payload.sleep_level,
    )


def _seconds(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise BadFrame(f"a start order's {name} is {value!r}; it must be finite seconds above 0")
    return value
