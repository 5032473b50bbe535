"""Measures the memory of a stage's devices, and checks that weights and slots fit into it."""

import os

import numpy as np

from orca_jax.config import Attention, ServingConfig
from orca_jax.errors import ConfigError
from orca_jax.execution.attention_backend import choose_attention
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import stage_bytes
from orca_jax.iteration.shape import EngineShape
from orca_jax.planning.known_devices import MODEST_KV_BYTES
from orca_jax.planning.stage_memory import StageRoom
from orca_jax.sharding.partition import StagePart
from orca_jax.workers.environment import held_fraction

_WITH_WEIGHTS = 64 << 20  # other device memory that may be in use once the weights are loaded
_BLOCK_SIZE = ServingConfig().block_size


def stage_room(
    config: ModelConfig,
    dtype: np.dtype,
    part: StagePart,
    *,
    n_devices: int,
    block_size: int = _BLOCK_SIZE,
    attention: Attention | None = None,
    memory_fraction: float | None = None,
) -> StageRoom:
    """The room that a stage's weights, loaded or not, leave on its devices; n_slots is chosen from it.

    `dtype` is that of weights, keys and values. `n_devices` counts the devices of all stages: CPU devices
    share the machine's memory. `attention` is chosen by device and model unless given. `memory_fraction` is
    the share of each device's memory that this engine may use: by default all that JAX reserves on a GPU, and
    a modest part on a CPU. Raises ConfigError if it exceeds JAX's reservation, and as `choose_attention`
    does.
    """
    device = part.group.devices[0]
    cpu = device.platform == "cpu"
    free = _left(config, dtype.itemsize, part, n_devices, memory_fraction)
    chosen = choose_attention(
        device,
        config,
        n_heads=config.n_heads // len(part.group),
        block_size=block_size,
        dtype=dtype,
        forced=attention,
    )
    modest = MODEST_KV_BYTES // n_devices if free is None or (cpu and memory_fraction is None) else None
    return StageRoom(
        layers=part.layers,
        n_devices=len(part.group),
        itemsize=dtype.itemsize,
        attention=chosen.kind,
        free=free,
        modest=modest,
    )


def check_slots(config: ModelConfig, room: StageRoom, shape: EngineShape, *, n_devices: int) -> None:
    """Check that the shape's slots fit into a stage's `room`. Raises ConfigError."""
    memory = room.memory(config, shape)
    what = f"the keys and values of n_slots = {shape.n_slots}"
    what += " in the model and the draft model" if room.draft else ""
    _refuse(what, shape.n_slots * room.slot_bytes(memory), room.kv_bytes(memory), n_devices)


def check_weights(config: ModelConfig, itemsize: int, part: StagePart, *, n_devices: int) -> None:
    """Check that the weights fit, before loading them exhausts the machine's memory. Raises ConfigError."""
    n_bytes = stage_bytes(config, part.layers, len(part.group), itemsize)
    memory = _usable(part, n_devices, None)
    free = None if memory is None else max(0, memory - _in_use(part))
    _refuse("the weights", n_bytes, free, n_devices)


def _refuse(what: str, n_bytes: int, free: int | None, n_devices: int) -> None:
    if free is not None and n_bytes > free:
        of = " of each device; it has" if n_devices > 1 else "; the device has"
        raise ConfigError(f"{what} take {n_bytes / 1e9:.1f} GB{of} {free / 1e9:.1f} GB for them")


def _left(
    config: ModelConfig, itemsize: int, part: StagePart, n_devices: int, memory_fraction: float | None
) -> int | None:
    """Each device's memory for everything but the weights, within the fraction; None if not reported.

    The result is the same at each start, before and after the weights are loaded, because sizes that differ
    would need other compiled programs. So memory in use counts only if it exceeds the weights by more than
    loading them explains.
    """
    memory = _usable(part, n_devices, memory_fraction)
    if memory is None:
        return None
    weights = stage_bytes(config, part.layers, len(part.group), itemsize)
    in_use = _in_use(part)
    return max(0, memory - (in_use if in_use > weights + _WITH_WEIGHTS else weights))


def _in_use(part: StagePart) -> int:
    """Bytes allocated by JAX on each device; 0 if not reported."""
    return (part.group.devices[0].memory_stats() or {}).get("bytes_in_use", 0)


def _usable(part: StagePart, n_devices: int, memory_fraction: float | None) -> int | None:
    """The memory that may be used on each of a stage's devices; None if not reported."""
    device = part.group.devices[0]
    if device.platform == "cpu":
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // n_devices
        return whole if memory_fraction is None else int(whole * memory_fraction)
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    limit, held = stats["bytes_limit"], held_fraction(os.environ)
    if memory_fraction is not None and held is not None:
        if memory_fraction > held + 0.005:
            raise ConfigError(
                f"memory_fraction is {memory_fraction:g}, and JAX holds {held:g} of a GPU's memory in this "
                f"process; set XLA_CLIENT_MEM_FRACTION={memory_fraction:g} before JAX starts, or lower it"
            )
        limit = int(limit * min(1.0, memory_fraction / held))
    return limit
