"""The order that starts an epoch: the payload of START frames.

The engine master decides the engine's sizes. Each START carries them, so a worker cannot use others.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from google.protobuf.message import Message

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
    `weights_directory`. Version 0, without a directory, is the weights that it began with. In the same way it
    adds the adapters of `adapters_directory` to these weights; `adapters_version` 0 means no adapters. In an
    epoch with a `sleep_level` it has no caches and runs no iteration; at level 2 its devices hold no weights
    either.
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
    return worker_pb2.Start(**asdict(order))


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
    for name in ("worker_seconds", "ready_seconds"):
        seconds = getattr(payload, name)
        if not 0 < seconds < math.inf:
            raise BadFrame(f"a start order's {name} is {seconds!r}; it must be finite seconds above 0")
    try:
        shape = EngineShape(**_fields_of(payload.shape, EngineShape))
    except ConfigError as error:
        raise BadFrame(f"a start order's {error}") from error
    return StartOrder(**{**_fields_of(payload, StartOrder), "shape": shape})


def _fields_of(payload: Message, kind: type[StartOrder | EngineShape]) -> dict[str, Any]:
    return {field.name: getattr(payload, field.name) for field in fields(kind)}


def _check_directory(kind: str, directory: str, version: int) -> None:
    if len(directory) > MAX_DIRECTORY or "\0" in directory or bool(directory) != bool(version):
        message = (
            f"a start order's {kind}_directory is {directory[:100]!r} and {kind}_version {version}; both "
        )
        raise BadFrame(
            message + f"must be set or neither, and a directory has up to {MAX_DIRECTORY} characters"
        )
