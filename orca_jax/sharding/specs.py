"""The PartitionSpecs of parameters and caches, from the letters of their axes."""

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from orca_jax.families.parameters import is_split
from orca_jax.sharding.device_group import TENSOR


def spec(axes: Sequence[str]) -> PartitionSpec:
    """The spec of an array with these axes, in the letters of families/parameters.py."""
    return PartitionSpec(*(TENSOR if is_split(axis) else None for axis in axes))


CACHE_SPEC = spec(("blocks", "K", "slots", "D"))  # keys or values of a layer, [n_blocks, K, B, D]
