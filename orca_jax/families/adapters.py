"""LoRA adapters as an engine holds them: which weights may have one, and in which arrays.

The adapters of a weight [*out, *in] are stacked, so that one program serves all of them: with room for n
adapters of a padded rank r they are `a` [n, P r, *in], and for each of the weight's P parts a `b` [n, *out of
the part, r]. A part is what a trainer adapts alone: queries, keys and values of `qkv`, gate and up of `up`.
Parts follow one another along the weight's first axis, on every device alike.

Experts [X, *out, in] have an adapter each: `a` [n, X, P r, in] and `b` [n, X, *out of the part, r]. The token
embedding is a matrix [E, V] here, whose input is a token, and a tied head has an adapter of its own.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from orca_jax.config import LoraExtra
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import (
    HEAD,
    TOKEN_EMBEDDING,
    Parameter,
    parameter_table,
    stage_parameters,
)
from orca_jax.families.weight_form import DENSE

RANK_MULTIPLE = 16  # products of CPUs and GPUs take inputs in such multiples
_HEADS, _QUERIES_AND_KEYS, _TWO = ("G+2", "G+G+2"), "G+1", "2"
# Read by attention itself or by the router, not by a product that could add a change.
_NOT_BY_PRODUCT = ("kv_b.weight", "router.weight")


class StackShapes(NamedTuple):
    """The shapes of a weight's stacks, without their first axis, which counts adapters."""

    a: tuple[int, ...]
    b: tuple[tuple[int, ...], ...]

    @property
    def n_elements(self) -> int:
        return sum(math.prod(shape) for shape in (self.a, *self.b))


def adaptable(
    config: ModelConfig, layers: range | None = None, extras: Collection[LoraExtra] = ()
) -> dict[str, Parameter]:
    """The weights of these layers (default: all) that may have an adapter: linear layers, and `extras`.

    A matrix's outputs come first, also those of the embedding; a tied head is among them as HEAD. A model
    with an encoder has no such extras: encoder, decoder and perhaps the head share one embedding.
    """
    table = parameter_table(config) if layers is None else stage_parameters(config, layers)
    found = {
        name: one
        for name, one in table.items()
        if (one.use == "linear" and not name.endswith(_NOT_BY_PRODUCT))
        or ("experts" in extras and one.use == "expert")
    }
    first, last = layers is None or layers.start == 0, layers is None or layers.stop == config.n_layers
    embedding = None if config.encoder is not None else table.get(TOKEN_EMBEDDING)
    head = None if config.encoder is not None else table.get(HEAD, embedding)
    if "embedding" in extras and first and embedding is not None:
        (rows, width), (n_rows, size) = embedding.axes, embedding.shape
        turned = {"axes": (width, rows), "shape": (size, n_rows)}
        found[TOKEN_EMBEDDING] = replace(embedding, form=DENSE, stage=None, **turned)
    if "head" in extras and last and head is not None:
        found[HEAD] = replace(head, form=DENSE, stage=None, use="head")
    return found


def extra_of(name: str, parameter: Parameter) -> LoraExtra | None:
    """The extra that a weight belongs to; None for a linear layer."""
    if parameter.use == "expert":
        return "experts"
    if name == TOKEN_EMBEDDING:
        return "embedding"
    return "head" if name == HEAD else None


def is_by_expert(parameter: Parameter) -> bool:
    """Whether each expert has a change of its own."""
    return parameter.use == "expert"


def part_sizes(parameter: Parameter) -> tuple[int, ...]:
    """The size of each part along the weight's first axis, after that of experts."""
    at = int(is_by_expert(parameter))
    first, size = parameter.axes[at], parameter.shape[at]
    if first in _HEADS:
        return (size - 2, 1, 1)
    if first == _QUERIES_AND_KEYS:
        return (size - 1, 1)
    return (1, 1) if first == _TWO else (size,)


def stack_shapes(parameter: Parameter, rank: int, n_devices: int = 1) -> StackShapes:
    """The shapes of the stacks on each of `n_devices`, for a padded rank."""
    shape, at = parameter.local_shape(n_devices), int(is_by_expert(parameter))
    experts, out, into = shape[:at], shape[at : -parameter.n_in], shape[-parameter.n_in :]
    parts = part_sizes(parameter)
    # A first axis that is split is one part.
    sizes = parts if len(parts) > 1 else (out[0],)
    a = (*experts, len(parts) * rank, *into)
    return StackShapes(a, tuple((*experts, size, *out[1:], rank) for size in sizes))


def change_shapes(parameter: Parameter, part: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of one adapter's `a` and `b` of a part of a whole weight, for its own rank."""
    shapes = stack_shapes(parameter, rank)
    n_experts = int(is_by_expert(parameter))
    return (*shapes.a[:n_experts], rank, *shapes.a[n_experts + 1 :]), shapes.b[part]


def padded_rank(rank: int) -> int:
    """The rank that stacks have room for."""
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def adapter_bytes(
    config: ModelConfig,
    layers: range,
    n_devices: int,
    itemsize: int,
    rank: int,
    extras: Collection[LoraExtra] = (),
) -> int:
    """Bytes that one adapter of the padded `rank` takes on each device of the stage of these layers."""
    return itemsize * sum(
        stack_shapes(one, rank, n_devices).n_elements for one in adaptable(config, layers, extras).values()
    )
