"""How what one stage computes reaches the next (ORCA 4.1: data from device to device, control apart)."""

from typing import Protocol

import jax

from orca_jax.sharding.device_group import DeviceGroup


class Link(Protocol):
    """From one stage to the next."""

    def send(self, hidden: jax.Array) -> jax.Array:
        """The hidden array [T, H] on the next stage's devices; returns without waiting for it."""
        ...


class DeviceLink:
    """Between device groups of one process: each device copies to its counterpart."""

    def __init__(self, to: DeviceGroup) -> None:
        self._place = to.place()

    def send(self, hidden: jax.Array) -> jax.Array:
        """As Link says."""
        return jax.device_put(hidden, self._place)
