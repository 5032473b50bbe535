"""Moves a stage's hidden states to the next stage (ORCA 4.1: data between devices, separate from control)."""

from typing import Protocol

import jax

from orca_jax.sharding.device_group import DeviceGroup


class ProcessLink(Protocol):
    """One stage's links to the previous and the next stage, which are other processes.

    No method waits. A key is (epoch, iteration, offering stage). `address` is passed to the next stage's
    process. If the link does not outlive a loss, its process must restart after a worker's loss.
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
        """Receive the previous stage's hidden states; `like` has their shape, dtype and sharding."""
        ...


class DeviceLink:
    """A link between device groups of one process: each device copies to its counterpart."""

    def __init__(self, to: DeviceGroup) -> None:
        self._place = to.place()

    def send(self, hidden: jax.Array) -> jax.Array:
        return jax.device_put(hidden, self._place)
