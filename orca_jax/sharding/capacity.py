"""What a device has room for: the parts of ServingConfig that follow from the model and from memory."""

import os
from typing import Any

from orca_jax.config import ModelConfig, ServingConfig
from orca_jax.cost_model import kv_bytes_per_slot
from orca_jax.errors import ConfigError
from orca_jax.kv_manager import round_up

Device = Any  # a jax.Device

# What `n_slots` takes at most by default, where the device does not say what it has ...
DEFAULT_KV_BYTES = 2 << 30
_KV_SHARE = 0.6  # ... and of the memory that the weights leave, where it does: the rest is for activations


def serving_config(
    config: ModelConfig,
    itemsize: int,
    device: Device,
    *,
    max_batch_size: int,
    n_slots: int | None,
    max_batch_tokens: int | None,
    block_size: int,
    max_queue: int,
) -> ServingConfig:
    """Fill in what was not said (None), and hold what was against the model and the device.

    `itemsize` is in bytes, of a key's or value's element. Raises ConfigError.
    """
    longest = config.n_positions
    if max_batch_tokens is None:
        max_batch_tokens = max(2048, longest, max_batch_size)

    def serving(n_slots: int) -> ServingConfig:
        return ServingConfig(
            max_batch_size=max_batch_size,
            n_slots=n_slots,
            max_batch_tokens=max_batch_tokens,
            block_size=block_size,
            max_queue=max_queue,
        )

    # Checks the types and ranges of what was said before it is used to compute the rest.
    said = serving(block_size if n_slots is None else n_slots)
    if max_batch_tokens < longest:
        raise ConfigError(
            f"max_batch_tokens is {max_batch_tokens}; it must be at least the model's {longest} positions, "
            "so that the longest prompt fits into one iteration"
        )
    slot_bytes = kv_bytes_per_slot(config, itemsize)
    if n_slots is None:
        whole_request = round_up(longest, block_size)
        free = _free_bytes(device)
        budget = DEFAULT_KV_BYTES if device.platform == "cpu" or free is None else int(free * _KV_SHARE)
        said = serving(max(whole_request, min(max_batch_size * whole_request, budget // slot_bytes)))
    check_memory(f"the keys and values of n_slots = {said.n_slots}", said.n_slots * slot_bytes, device)
    return said


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
