"""What a stage's devices have room for."""

import math
import os

from orca_jax.config import ModelConfig
from orca_jax.cost_model import kv_bytes_per_slot
from orca_jax.errors import ConfigError
from orca_jax.model.gpt import parameter_shapes
from orca_jax.sharding.partition import StagePart

# What keys and values take at most by default, where the device does not say what it has ...
DEFAULT_KV_BYTES = 2 << 30
_KV_SHARE = 0.6  # ... and of the memory that the weights leave, where it does: the rest is for activations


def slots_that_fit(config: ModelConfig, itemsize: int, part: StagePart, *, n_devices: int) -> int:
    """Slots that a stage has room for by default, weights loaded.

    `itemsize` is in bytes, of a key's or value's element. `n_devices` are those of all stages: where they
    are a CPU's, they share the machine's memory.
    """
    free = _free_bytes(part, n_devices)
    if part.group.devices[0].platform == "cpu" or free is None:
        budget = DEFAULT_KV_BYTES // n_devices
    else:
        budget = int(free * _KV_SHARE)
    return budget // slot_bytes(config, itemsize, part)


def check_slots(config: ModelConfig, itemsize: int, part: StagePart, *, n_slots: int, n_devices: int) -> None:
    """Refuse more slots than there is memory for. Raises ConfigError."""
    n_bytes = n_slots * slot_bytes(config, itemsize, part)
    _check(f"the keys and values of n_slots = {n_slots}", n_bytes, part, n_devices)


def check_weights(config: ModelConfig, itemsize: int, part: StagePart, *, n_devices: int) -> None:
    """Refuse what can never fit, before the machine grinds to a halt over it. Raises ConfigError."""
    shapes = parameter_shapes(config)
    n_bytes = sum(
        itemsize * math.prod(sharding.shard_shape(shapes[name]))
        for name, sharding in part.placement(config).items()
    )
    _check("the weights", n_bytes, part, n_devices)


def slot_bytes(config: ModelConfig, itemsize: int, part: StagePart) -> int:
    """Bytes that one slot takes on each of a stage's devices."""
    return kv_bytes_per_slot(config, itemsize) // config.n_layers * len(part.layers) // len(part.group)


def _check(what: str, n_bytes: int, part: StagePart, n_devices: int) -> None:
    free = _free_bytes(part, n_devices)
    if free is not None and n_bytes > free:
        of = " of each device; it has" if n_devices > 1 else "; the device has"
        raise ConfigError(f"{what} take {n_bytes / 1e9:.1f} GB{of} {free / 1e9:.1f} GB for them")


def _free_bytes(part: StagePart, n_devices: int) -> int | None:
    """What the memory of each of a stage's devices still holds, None where they do not say."""
    device = part.group.devices[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // n_devices
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None
