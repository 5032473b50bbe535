"""The devices of one stage: a mesh with one axis, over which layers are split (ORCA 4.1, intra-layer)."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from orca_jax.config import Dtype, ExpertExchange
from orca_jax.model.shard import ALONE, Shard, TokenExchange
from orca_jax.planning.expert_exchange import ExchangeRule
from orca_jax.planning.known_devices import gpu_like


def scattered(x: jax.Array, axis: str) -> jax.Array:
    """Sum [n S, H] over devices, and give each its slice [S, H]."""
    return lax.psum_scatter(x, axis, tiled=True)


def gathered(x: jax.Array, axis: str) -> jax.Array:
    """Stack all devices' slices [S, H]."""
    return lax.all_gather(x, axis, tiled=True)


def send_ragged(rows: jax.Array, counts: jax.Array, *, most: int, n_received: int, axis: str) -> jax.Array:
    """Implement model.shard.Send with XLA's ragged all-to-all, which needs no padding; CPUs have none."""
    me = lax.axis_index(axis)
    first = jnp.cumsum(counts, axis=1) - counts  # where the rows for each device begin on the sender
    place = jnp.cumsum(counts, axis=0) - counts  # and on the receiver
    empty = jnp.zeros((n_received, rows.shape[1]), rows.dtype)
    return lax.ragged_all_to_all(rows, empty, first[me], counts[me], place[me], counts[:, me], axis_name=axis)


def send_padded(rows: jax.Array, counts: jax.Array, *, most: int, n_received: int, axis: str) -> jax.Array:
    """Implement model.shard.Send with an all-to-all of `most` rows between any two devices."""
    me = lax.axis_index(axis)
    first = jnp.cumsum(counts, axis=1) - counts
    place = jnp.cumsum(counts, axis=0) - counts
    row = jnp.arange(most)
    blocks = rows.at[first[me][:, None] + row].get(mode="clip")  # [n, most, H]; more than there are
    blocks = lax.all_to_all(blocks, axis, 0, 0)
    to = jnp.where(row < counts[:, me, None], place[:, me, None] + row, n_received)
    received = jnp.zeros((n_received, rows.shape[1]), rows.dtype)
    return received.at[to].set(blocks, mode="drop")


TENSOR = "tensor"  # the mesh's axis
WHOLE = PartitionSpec()

Device = Any  # a jax.Device


def default_dtype(device: Device) -> Dtype:
    """The default dtype of weights, keys and values."""
    return "float32" if device.platform == "cpu" else "bfloat16"


def device_name(device: Device) -> str:
    """The device's name in startup messages."""
    return "cpu" if device.platform == "cpu" else device.device_kind


@dataclass(frozen=True)
class DeviceGroup:
    """One stage's devices in the order of their shards, and how they exchange tokens for experts."""

    devices: tuple[Device, ...]
    expert_exchange: ExpertExchange = "auto"

    def __len__(self) -> int:
        return len(self.devices)

    @cached_property
    def mesh(self) -> Mesh:
        """The devices along the axis `TENSOR`."""
        return Mesh(np.array(self.devices), (TENSOR,))

    def place(self, spec: PartitionSpec = WHOLE) -> jax.sharding.Sharding:
        """The sharding of an array split by `spec`; by default every device holds the whole."""
        if len(self) == 1:
            # One-device programs return this sharding; a mesh of one device would compile each program twice.
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, spec)

    def receive(self, hidden: jax.Array) -> jax.Array:
        """Copy another group's hidden states here, each device from its counterpart."""
        return jax.device_put(hidden, self.place())

    def shard(self) -> Shard:
        """The part that the current device computes, inside a shard_map over `mesh`."""
        if len(self) == 1:
            return ALONE
        return Shard(
            n=len(self),
            index=jax.lax.axis_index(TENSOR),
            total=lambda x: jax.lax.psum(x, TENSOR),
            side_by_side=lambda x: jax.lax.all_gather(x, TENSOR, axis=x.ndim - 1, tiled=True),
            joined=lambda x: jax.lax.psum(x, TENSOR),
            exchange=self.token_exchange,
        )

    @cached_property
    def token_exchange(self) -> TokenExchange:
        """The exchange of tokens for layers whose devices hold whole experts, where the rule says so."""
        device = self.devices[0]
        on_cpu = device.platform == "cpu"
        return TokenExchange(
            wanted=ExchangeRule(
                device=None if on_cpu else gpu_like(device.device_kind),
                n_devices=len(self),
                asked=self.expert_exchange,
            ),
            scattered=partial(scattered, axis=TENSOR),
            gathered=partial(gathered, axis=TENSOR),
            send=partial(send_padded if on_cpu else send_ragged, axis=TENSOR),
        )
