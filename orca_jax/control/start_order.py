"""What a worker is told at the start of an epoch: the payload of START frames, JSON.

The engine's sizes are its own affair, and each START says them, so that a worker cannot have others.
"""

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from orca_jax.errors import BadFrame, ConfigError
from orca_jax.iteration.shape import EngineShape

MAX_ADDRESS = 1_000  # characters
_MAX_PAYLOAD = 16 << 10  # bytes; an address of characters that JSON escapes twice fits


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOrder:
    """One stage's order to be ready for an epoch of an engine of these sizes.

    `next_address` is the control address of the next stage's worker, "" for the last stage. The worker's
    patience with its device, in seconds: `worker_seconds` for an iteration or for new caches, and
    `ready_seconds` where programs have to be made first.
    """

    shape: EngineShape
    next_address: str
    worker_seconds: float
    ready_seconds: float


def encode_start(order: StartOrder) -> bytes:
    """The order's bytes."""
    return json.dumps(asdict(order), separators=(",", ":")).encode()


def decode_start(payload: bytes) -> StartOrder:
    """The order that these bytes are. Raises BadFrame."""
    if len(payload) > _MAX_PAYLOAD:
        raise BadFrame(f"a start order of {len(payload)} bytes came; up to {_MAX_PAYLOAD} are allowed")
    try:
        found: object = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadFrame("a start order came that is not JSON") from error
    order = _exactly(found, StartOrder, "a start order")
    sizes = _exactly(order["shape"], EngineShape, "the shape of a start order")
    try:
        shape = EngineShape(**sizes)
    except ConfigError as error:
        raise BadFrame(f"a start order came whose {error}") from error
    address = order["next_address"]
    if not isinstance(address, str) or len(address) > MAX_ADDRESS or not address.isprintable():
        message = f"a start order came whose next_address is {_shown(address)}; it must be a line of up to "
        raise BadFrame(message + f"{MAX_ADDRESS} characters")
    return StartOrder(
        shape=shape,
        next_address=address,
        worker_seconds=_seconds("worker_seconds", order["worker_seconds"]),
        ready_seconds=_seconds("ready_seconds", order["ready_seconds"]),
    )


def _exactly(found: object, of: type[StartOrder] | type[EngineShape], what: str) -> dict[str, Any]:
    names = {field.name for field in fields(of)}
    order = cast("dict[str, Any] | None", found if isinstance(found, dict) else None)
    if order is None or order.keys() != names:
        raise BadFrame(f"{what} came that has not these fields: {', '.join(sorted(names))}")
    return order


def _seconds(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
        if 0 < seconds < math.inf:
            return seconds
    raise BadFrame(f"a start order came whose {name} is {_shown(value)}; it must be seconds above 0")


def _shown(value: object) -> str:
    return repr(value)[:100]
