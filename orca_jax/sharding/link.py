"""How what one stage computes reaches the next (ORCA 4.1: data from device to device, control apart)."""

from typing import Protocol

import jax

from orca_jax.sharding.device_group import DeviceGroup


class Link(Protocol):
    """From one stage to the next in one process."""

    def send(self, hidden: jax.Array) -> jax.Array:
        """The hidden array [T, H] on the next stage's devices; returns without waiting for it."""
        ...


class ProcessLink(Protocol):
    """One stage's end of the links to the stages before and behind it, which are other processes.

    Nothing here waits. A key is (epoch, iteration, stage), of the stage that offers. `address` is what the
    next stage's end must be told; where a link does not outlive a loss, its process must start again then.
    """

    address: str
    outlives_a_loss: bool

    def offer(self, key: tuple[int, int, int], hidden: jax.Array) -> int:
        """Let the next stage have an iteration's hidden states [T, H]; gives the bytes of that."""
        ...

    def connect(self, address: str) -> None:
        """The stage before is at this address in this epoch."""
        ...

    def pull(self, key: tuple[int, int, int], like: jax.ShapeDtypeStruct) -> jax.Array:
        """The hidden states of the stage before on this stage's devices; `like` says shape, dtype, place."""
        ...


class DeviceLink:
    """Between device groups of one process: each device copies to its counterpart."""

    def __init__(self, to: DeviceGroup) -> None:
        self._place = to.place()

    def send(self, hidden: jax.Array) -> jax.Array:
        """As Link says."""
        return jax.device_put(hidden, self._place)
