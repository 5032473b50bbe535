"""The PartitionSpecs of weights and caches, and the encoding of weights on their devices."""

from functools import cache
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from orca_jax.families.parameters import Parameter
from orca_jax.families.weight_form import Dense, HeldArray
from orca_jax.model.weight import held, kind_of
from orca_jax.sharding.device_group import TENSOR

# Keys or values of a layer, [n_blocks, K, B, D], or their scales, [n_blocks, K, B]; states of a recurrent
# layer, [n_states, N, ...] with heads or shares (Recurrence.state_shapes).
CACHE_SPEC = PartitionSpec(None, TENSOR)


def spec(parameter: Parameter, n_devices: int) -> PartitionSpec:
    """The spec of a dense parameter that is split over `n_devices`."""
    return _spec_of(range(len(parameter.axes)), parameter, n_devices)


def held_specs(parameter: Parameter, n_devices: int) -> Any:
    """The spec of a dense parameter, or a FormedWeight with the spec of each of its arrays."""

    def spec_of(array: HeldArray) -> PartitionSpec:
        return _spec_of(array.axes, parameter, n_devices)

    return held(parameter, jax.numpy.float32, spec_of)


def _spec_of(axes: Any, parameter: Parameter, n_devices: int) -> PartitionSpec:
    split = parameter.split_axis(n_devices)
    return PartitionSpec(*(TENSOR if axis == split and split is not None else None for axis in axes))


def stack_specs(parameter: Parameter, n_devices: int) -> tuple[PartitionSpec, PartitionSpec]:
    """The specs of the stacks `a` and `b` of a weight's adapters (families/adapters.py).

    Each axis that they share with the weight is split as the weight's is. So each device computes its share
    of B (A x): its outputs, or where inputs are split a part of the sum that the product needs anyway.
    """
    axes = spec(parameter, n_devices)
    n_out = len(parameter.axes) - parameter.n_in
    return PartitionSpec(None, None, *axes[n_out:]), PartitionSpec(None, *axes[:n_out], None)


def place_of_dense(parameter: Parameter, places: Any) -> Sharding:
    """The place of a parameter's dense numbers before encoding, from the places of its arrays."""
    one = jax.tree.leaves(places)[0]
    if isinstance(one, NamedSharding):
        return NamedSharding(one.mesh, spec(parameter, one.mesh.size))
    return one


def in_form(parameter: Parameter, dense: jax.Array, places: Any) -> Any:
    """Encode dense numbers in the parameter's form, each array in its place."""
    if isinstance(parameter.form, Dense):
        return dense
    leaves, tree = jax.tree.flatten(places)
    return _encoding(parameter, tuple(leaves), tree)(dense)


@cache
def _encoding(parameter: Parameter, places: tuple[Sharding, ...], tree: Any) -> Any:
    kind, form = kind_of(parameter.form), parameter.form
    return jax.jit(lambda dense: kind.encoded(form, dense), out_shardings=jax.tree.unflatten(tree, places))
