"""LoRA adapters as an engine holds them: which weights may have one, and in which arrays.

The adapters of a weight [*out, *in] are stacked, so that one program serves all of them: with room for n
adapters of a padded rank r they are `a` [n, P r, *in], and for each of the weight's P parts a `b` [n, *out of
the part, r]. A part is what a trainer adapts alone: queries, keys and values of `qkv`, gate and up of `up`.
Parts follow one another along the weight's first axis, on every device alike.
"""

import math
from typing import NamedTuple

from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import Parameter, parameter_table, stage_parameters

RANK_MULTIPLE = 16  # products of CPUs and GPUs take inputs in such multiples
_HEADS, _TWO = ("G+2", "G+G+2"), "2"
# Read by attention itself or by the router, not by a product that could add a change.
_NOT_BY_PRODUCT = ("kv_b.weight", "router.weight")


class StackShapes(NamedTuple):
    """The shapes of a weight's stacks, without their first axis, which counts adapters."""

    a: tuple[int, ...]
    b: tuple[tuple[int, ...], ...]

    @property
    def n_elements(self) -> int:
        return sum(math.prod(shape) for shape in (self.a, *self.b))


def adaptable(config: ModelConfig, layers: range | None = None) -> dict[str, Parameter]:
    """The weights of these layers (default: all) that may have an adapter: linear layers, by name."""
    table = parameter_table(config) if layers is None else stage_parameters(config, layers)
    return {
        name: one
        for name, one in table.items()
        if one.use == "linear" and one.stage is None and not name.endswith(_NOT_BY_PRODUCT)
    }


def part_sizes(parameter: Parameter) -> tuple[int, ...]:
    """The size of each part along the weight's first axis."""
    first, size = parameter.axes[0], parameter.shape[0]
    if first in _HEADS:
        return (size - 2, 1, 1)
    return (1, 1) if first == _TWO else (size,)


def stack_shapes(parameter: Parameter, rank: int, n_devices: int = 1) -> StackShapes:
    """The shapes of the stacks on each of `n_devices`, for a padded rank."""
    shape = parameter.local_shape(n_devices)
    out, into = shape[: -parameter.n_in], shape[-parameter.n_in :]
    parts = part_sizes(parameter)
    # A first axis that is split is one part.
    sizes = parts if len(parts) > 1 else (out[0],)
    return StackShapes((len(parts) * rank, *into), tuple((size, *out[1:], rank) for size in sizes))


def padded_rank(rank: int) -> int:
    """The rank that stacks have room for."""
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def adapter_bytes(config: ModelConfig, layers: range, n_devices: int, itemsize: int, rank: int) -> int:
    """Bytes that one adapter of the padded `rank` takes on each device of the stage of these layers."""
    return itemsize * sum(
        stack_shapes(one, rank, n_devices).n_elements for one in adaptable(config, layers).values()
    )
