"""What a device has room for: the parts of ServingConfig that follow from the model and from memory."""

import os
from dataclasses import dataclass
from typing import Any

from orca_jax.config import ModelConfig, ServingConfig
from orca_jax.cost_model import kv_bytes_per_slot
from orca_jax.errors import ConfigError
from orca_jax.kv_manager import round_up

Device = Any  # a jax.Device

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


def serving_config(config: ModelConfig, itemsize: int, device: Device, said: Sizes) -> ServingConfig:
    """Fill in what was not said, and hold what was against the model and the device.

    `itemsize` is in bytes, of a key's or value's element. Raises ConfigError.
    """
    longest = config.n_positions
    whole_request = round_up(longest, said.block_size)
    slot_bytes = kv_bytes_per_slot(config, itemsize)
    free = _free_bytes(device)
    budget = DEFAULT_KV_BYTES if device.platform == "cpu" or free is None else int(free * _KV_SHARE)
    serving = said.filled(
        n_slots=max(whole_request, min(said.max_batch_size * whole_request, budget // slot_bytes)),
        max_batch_tokens=max(2048, longest, said.max_batch_size),
    )
    if serving.max_batch_tokens < longest:
        raise ConfigError(
            f"max_batch_tokens is {serving.max_batch_tokens}; it must be at least the model's {longest} "
            "positions, so that the longest prompt fits into one iteration"
        )
    n_bytes = serving.n_slots * slot_bytes
    check_memory(f"the keys and values of n_slots = {serving.n_slots}", n_bytes, device)
    return serving


def check_memory(what: str, n_bytes: int, device: Device) -> None:
    """Refuse what can never fit, before the machine grinds to a halt over it. Raises ConfigError."""
    free = _free_bytes(device)
    if free is not None and n_bytes > free:
        raise ConfigError(f"{what} take {n_bytes / 1e9:.1f} GB; the device has {free / 1e9:.1f} GB for them")


def _free_bytes(device: Device) -> int | None:
    """What the device's memory still holds, None where it does not say; for a CPU all of the machine's."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None
