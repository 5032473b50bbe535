"""The devices of one stage: a mesh with one axis, over which layers are split (ORCA 4.1, intra-layer)."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from orca_jax.config import Dtype, ExpertExchange
from orca_jax.model.shard import ALONE, Shard, TokenExchange
from orca_jax.planning.expert_exchange import ExchangeRule
from orca_jax.planning.known_devices import gpu_like
from orca_jax.sharding import token_exchange

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
            scattered=partial(token_exchange.scattered, axis=TENSOR),
            gathered=partial(token_exchange.gathered, axis=TENSOR),
            send=partial(token_exchange.send_padded if on_cpu else token_exchange.send_ragged, axis=TENSOR),
        )
