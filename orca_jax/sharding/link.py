"""Moves a stage's hidden states to the next stage (ORCA 4.1: data between devices, separate from control)."""

from typing import Protocol

import jax

from orca_jax.sharding.device_group import DeviceGroup


class ProcessLink(Protocol):
    """One stage's links to the previous and the next stage, which are other processes.

    No method waits. A key is (epoch, iteration, stage), with the stage that offers. `address` is passed to
    the next stage's process. If the link does not outlive a loss, its process must restart after one.
    """

    address: str
    outlives_a_loss: bool

    def offer(self, key: tuple[int, int, int], hidden: jax.Array) -> int:
        """Make an iteration's hidden states [T, H] available to the next stage; returns their bytes."""
        ...

    def connect(self, address: str) -> None:
        """Use this address of the previous stage in the new epoch."""
        ...

    def pull(self, key: tuple[int, int, int], like: jax.ShapeDtypeStruct) -> jax.Array:
        """The previous stage's hidden states on this stage's devices; `like` has shape, dtype, sharding."""
        ...


class DeviceLink:
    """A link between device groups of one process: each device copies to its counterpart."""

    def __init__(self, to: DeviceGroup) -> None:
        self._place = to.place()

    def send(self, hidden: jax.Array) -> jax.Array:
        return jax.device_put(hidden, self._place)
