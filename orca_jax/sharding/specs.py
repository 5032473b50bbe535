"""The PartitionSpecs of parameters and caches, from the letters of their axes."""

from jax.sharding import PartitionSpec

from orca_jax.families.parameters import Parameter
from orca_jax.sharding.device_group import TENSOR


def spec(parameter: Parameter, n_devices: int) -> PartitionSpec:
    """The spec of a parameter that is split over `n_devices`."""
    split = parameter.split_axis(n_devices)
    return PartitionSpec(*(TENSOR if i == split else None for i in range(len(parameter.axes))))


CACHE_SPEC = PartitionSpec(None, TENSOR, None, None)  # keys or values of a layer, [n_blocks, K, B, D]
