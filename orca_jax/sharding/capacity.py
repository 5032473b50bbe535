"""What a device has room for: the parts of ServingConfig that follow from the model and from memory."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from orca_jax.config import ModelConfig, ServingConfig
from orca_jax.cost_model import kv_bytes_per_slot
from orca_jax.errors import ConfigError
from orca_jax.kv_manager import round_up
from orca_jax.model.gpt import parameter_shapes
from orca_jax.sharding.partition import StagePart

# What `n_slots` takes at most by default, where the device does not say what it has ...
DEFAULT_KV_BYTES = 2 << 30
_KV_SHARE = 0.6  # ... and of the memory that the weights leave, where it does: the rest is for activations


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What was said of a ServingConfig; None: it follows from model and device. Checked when made."""

    max_batch_size: int = 32
    n_slots: int | None = None
    max_batch_tokens: int | None = None
    block_size: int = 16
    max_queue: int = 1 << 20

    def __post_init__(self) -> None:
        self.filled(n_slots=self.block_size, max_batch_tokens=1 << 20)

    def filled(self, *, n_slots: int, max_batch_tokens: int) -> ServingConfig:
        """With these where nothing was said. Raises ConfigError."""
        return ServingConfig(
            max_batch_size=self.max_batch_size,
            n_slots=n_slots if self.n_slots is None else self.n_slots,
            max_batch_tokens=max_batch_tokens if self.max_batch_tokens is None else self.max_batch_tokens,
            block_size=self.block_size,
            max_queue=self.max_queue,
        )


def serving_config(
    config: ModelConfig, itemsize: int, parts: Sequence[StagePart], said: Sizes
) -> ServingConfig:
    """Fill in what was not said, and hold what was against the model and the devices, weights loaded.

    `itemsize` is in bytes, of a key's or value's element. A slot takes room on every stage, so the device
    with the least for it decides. Raises ConfigError.
    """
    longest = config.n_positions
    whole_request = round_up(longest, said.block_size)
    fits = [_budget(part, parts) // slot_bytes(config, itemsize, part) for part in parts]
    serving = said.filled(
        n_slots=max(whole_request, min(said.max_batch_size * whole_request, *fits)),
        max_batch_tokens=max(2048, longest, said.max_batch_size),
    )
    if serving.max_batch_tokens < longest:
        raise ConfigError(
            f"max_batch_tokens is {serving.max_batch_tokens}; it must be at least the model's {longest} "
            "positions, so that the longest prompt fits into one iteration"
        )
    for part in parts:
        n_bytes = serving.n_slots * slot_bytes(config, itemsize, part)
        _check(f"the keys and values of n_slots = {serving.n_slots}", n_bytes, part, parts)
    return serving


def check_weights(config: ModelConfig, itemsize: int, parts: Sequence[StagePart]) -> None:
    """Refuse what can never fit, before the machine grinds to a halt over it. Raises ConfigError."""
    shapes = parameter_shapes(config)
    for part in parts:
        n_bytes = sum(
            itemsize * math.prod(sharding.shard_shape(shapes[name]))
            for name, sharding in part.placement(config).items()
        )
        _check("the weights", n_bytes, part, parts)


def slot_bytes(config: ModelConfig, itemsize: int, part: StagePart) -> int:
    """Bytes that one slot takes on each of a stage's devices."""
    return kv_bytes_per_slot(config, itemsize) // config.n_layers * len(part.layers) // len(part.group)


def _budget(part: StagePart, parts: Sequence[StagePart]) -> int:
    """Bytes of one of a stage's devices for keys and values by default."""
    free = _free_bytes(part, parts)
    if part.group.devices[0].platform == "cpu" or free is None:
        return DEFAULT_KV_BYTES // _n_devices(parts)
    return int(free * _KV_SHARE)


def _check(what: str, n_bytes: int, part: StagePart, parts: Sequence[StagePart]) -> None:
    free = _free_bytes(part, parts)
    if free is not None and n_bytes > free:
        of = " of each device; it has" if _n_devices(parts) > 1 else "; the device has"
        raise ConfigError(f"{what} take {n_bytes / 1e9:.1f} GB{of} {free / 1e9:.1f} GB for them")


def _n_devices(parts: Sequence[StagePart]) -> int:
    return sum(len(part.group) for part in parts)


def _free_bytes(part: StagePart, parts: Sequence[StagePart]) -> int | None:
    """What the memory of each of a stage's devices still holds, None where they do not say.

    Devices of a CPU share the machine's.
    """
    device = part.group.devices[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _n_devices(parts)
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None
