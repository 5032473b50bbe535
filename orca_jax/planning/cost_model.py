"""What one iteration must move and compute: one truth for benchmarks' floors, `orca plan` and simulation.

Counts what cannot be avoided on one device: each weight read once, each activation written and read once
between operations, each key and value in reach read once. Norms, activation functions and residual sums
are taken to be fused into the matrix products beside them, and cost nothing here.

A model may be cut (ORCA 4.1): into stages of `layers`, and each layer over `n_shards` devices. Then it is
counted what one device of the stage does, and what it sends to the others.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import (
    HEAD,
    TOKEN_EMBEDDING,
    Parameter,
    Stage,
    layer_parameters,
    outside_parameters,
    stage_elements,
)

OperationKind = Literal["embed", "linear", "attention", "head", "sampler"]

LOGIT_BYTES = 4  # logits are float32, whatever the weights are


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of an iteration: bytes to and from memory, and floating-point operations."""

    kind: OperationKind
    n_bytes: float
    n_flops: float


@dataclass(frozen=True, slots=True)
class Device:
    """What a device can do: `bandwidth` in bytes, `matrix_rate` in floating-point operations, a second."""

    bandwidth: float
    matrix_rate: float


class IterationSums(NamedTuple):
    """All that an iteration's cost depends on: sums over the requests of its batch.

    `n_rows` requests, `n_tokens` that go in, `n_keys` in the cache after they were written, and `n_seen`
    pairs of a query and a key that it sees. The bytes of an operation, and its floating-point operations, are
    a constant and multiples of these.
    """

    n_rows: int
    n_tokens: int
    n_keys: int
    n_seen: int


@dataclass(frozen=True, slots=True)
class IterationShape:
    """The requests of one iteration, one entry each.

    `input_lengths`: tokens that go in (all known tokens in the initiation phase, one in the increment
    phase). `kv_lengths`: tokens in the cache after they were written, the input ones included.
    """

    input_lengths: Sequence[int]
    kv_lengths: Sequence[int]

    def __post_init__(self) -> None:
        pairs = zip(self.input_lengths, self.kv_lengths, strict=True)
        assert all(1 <= q <= k for q, k in pairs), "a row's input tokens are the last of its kv_length"

    def sums(self) -> IterationSums:
        """Those of its requests."""
        pairs = zip(self.input_lengths, self.kv_lengths, strict=True)
        return IterationSums(
            n_rows=len(self.input_lengths),
            n_tokens=sum(self.input_lengths),
            n_keys=sum(self.kv_lengths),
            n_seen=sum(keys_seen(q, k) for q, k in pairs),
        )


def keys_seen(n_input: int, kv_length: int) -> int:
    """Keys that the queries of one request see: each up to its own position, kv_length the last of them."""
    return n_input * (kv_length - n_input) + n_input * (n_input + 1) // 2


def operations(
    model: ModelConfig,
    shape: IterationShape | IterationSums,
    *,
    weight_bytes: int,
    kv_bytes: int,
    layers: range | None = None,
    n_shards: int = 1,
) -> list[Operation]:
    """The operations of one iteration in the order they run, on one of the `n_shards` devices of a stage.

    `weight_bytes` is the size of one element of weights and activations, `kv_bytes` of one element of the
    K/V cache. Per layer of the stage's `layers` (by default all): its linear operations, and attention before
    the one that takes its result; before the model's first the embedding, after its last head (one row a
    request) and sampler.
    """
    layers = range(model.n_layers) if layers is None else layers
    sums = _sums(shape)
    stage = _stage_products(model, layers, n_shards)

    def linear(product: _Product) -> Operation:
        n_activations = sums.n_tokens * (product.n_in + product.n_out)
        n_bytes = weight_bytes * (product.n_weights + n_activations)
        return Operation("linear", n_bytes, 2 * sums.n_tokens * product.n_in * product.n_out)

    def layer(products: Sequence[_Product]) -> Iterator[Operation]:
        for product in products:
            if product.takes_attention:
                yield _attention(product.n_in, sums, weight_bytes=weight_bytes, kv_bytes=kv_bytes)
            yield linear(product)

    found: list[Operation] = []
    if layers.start == 0:
        # A token's row of each table is read, their sum is written.
        n_embed_bytes = weight_bytes * sums.n_tokens * (sum(stage.tables) + model.hidden_size)
        n_embed_flops = sums.n_tokens * model.hidden_size * (len(stage.tables) - 1)
        found.append(Operation("embed", n_embed_bytes, n_embed_flops))
        found += map(linear, stage.before)
    for products, count in stage.layers:
        found += [*layer(products)] * count
    if stage.head is not None:
        found += map(linear, stage.after)
        own_vocab, n_in = stage.head
        n_logit_bytes = LOGIT_BYTES * sums.n_rows * own_vocab
        n_head_bytes = weight_bytes * n_in * (own_vocab + sums.n_rows) + n_logit_bytes
        found.append(Operation("head", n_head_bytes, 2 * sums.n_rows * n_in * own_vocab))
        vocab = model.padded_vocab_size  # each device chooses from all logits
        found.append(Operation("sampler", LOGIT_BYTES * sums.n_rows * vocab, sums.n_rows * vocab))
    return found


class _Product(NamedTuple):
    """A linear operation on one device; `n_weights` counts the bias too."""

    n_in: int
    n_out: int
    n_weights: int
    takes_attention: bool  # its input is what attention returns


class _StageProducts(NamedTuple):
    """What a stage multiplies by.

    A token's row is read of `tables`, by their widths. `layers` has neighbours that are alike as one, with
    their number. `head` is [own vocabulary, in].
    """

    tables: tuple[int, ...]
    before: tuple[_Product, ...]
    layers: tuple[tuple[tuple[_Product, ...], int], ...]
    after: tuple[_Product, ...]
    head: tuple[int, int] | None


@lru_cache(maxsize=4096)
def _stage_products(model: ModelConfig, layers: range, n_shards: int) -> _StageProducts:
    outside = outside_parameters(model, layers)

    def product(parameter: Parameter, bias: Parameter | None = None) -> _Product:
        *out, n_in = parameter.local_shape(n_shards)
        n_out = math.prod(out)
        n_biases = 0 if bias is None else math.prod(bias.local_shape(n_shards))
        return _Product(n_in, n_out, n_in * n_out + n_biases, "N" in parameter.axes[-1])

    def of_layer(parameters: Mapping[str, Parameter]) -> tuple[_Product, ...]:
        return tuple(
            product(parameter, parameters.get(name.replace(".weight", ".bias")))
            for name, parameter in parameters.items()
            if parameter.use == "linear"
        )

    def projections(stage: Stage) -> tuple[_Product, ...]:
        return tuple(product(one) for one in outside.values() if one.use == "linear" and one.stage == stage)

    alike = [[*group] for _, group in groupby(layers, lambda i: model.layers[i])]
    head = None
    if layers.stop == model.n_layers:
        own_vocab, n_in = (outside.get(HEAD) or outside[TOKEN_EMBEDDING]).local_shape(n_shards)
        head = own_vocab, n_in
    return _StageProducts(
        tables=tuple(one.shape[1] for one in outside.values() if one.use == "embedding"),
        before=projections("first"),
        layers=tuple((of_layer(layer_parameters(model, group[0])), len(group)) for group in alike),
        after=projections("last"),
        head=head,
    )


def shared_bytes(
    model: ModelConfig,
    shape: IterationShape | IterationSums,
    *,
    weight_bytes: int,
    layers: range | None = None,
    n_shards: int = 1,
) -> float:
    """Bytes that each device of a stage sends to the others of it in one iteration.

    Two sums over the devices a layer (behind `out` and `down`) and one behind the embedding, each by a ring,
    in which a device sends 2 (n - 1) / n of the array; behind the head the logits are put side by side.
    """
    layers = range(model.n_layers) if layers is None else layers
    n_sums = 2 * len(layers) + (layers.start == 0)
    n_summed = n_sums * hop_bytes(model, shape, weight_bytes=weight_bytes)
    n_rows = _sums(shape).n_rows
    n_gathered = weight_bytes * n_rows * model.padded_vocab_size * (layers.stop == model.n_layers)
    return (n_shards - 1) / n_shards * (2 * n_summed + n_gathered)


def hop_bytes(model: ModelConfig, shape: IterationShape | IterationSums, *, weight_bytes: int) -> int:
    """Bytes of the hidden states [T, H]: what each device of a stage sends to the next stage."""
    return weight_bytes * _sums(shape).n_tokens * model.hidden_size


def _sums(shape: IterationShape | IterationSums) -> IterationSums:
    return shape.sums() if isinstance(shape, IterationShape) else shape


def _attention(hidden: int, sums: IterationSums, *, weight_bytes: int, kv_bytes: int) -> Operation:
    """Split attention of one layer: queries in, keys and values written, all in reach read, results out."""
    n_kv_bytes = 2 * hidden * kv_bytes * (sums.n_tokens + sums.n_keys)
    # A key and a query: 2 operations an element; a weight and a value: 2 more.
    n_bytes = n_kv_bytes + 2 * sums.n_tokens * hidden * weight_bytes
    return Operation("attention", n_bytes, 4 * hidden * sums.n_seen)


def floor(operations: Iterable[Operation], device: Device) -> float:
    """Seconds below which these operations cannot run one after the other on `device`.

    The sum over operations of the larger of bytes over bandwidth and operations over the matrix rate.
    """
    return sum(max(op.n_bytes / device.bandwidth, op.n_flops / device.matrix_rate) for op in operations)


def parameter_count(model: ModelConfig) -> int:
    """Elements of all weights, the padded rows of the vocabulary included."""
    return stage_elements(model, range(model.n_layers), 1)


def weight_bytes_total(model: ModelConfig, itemsize: int) -> int:
    """Bytes of all weights at `itemsize` bytes an element."""
    return parameter_count(model) * itemsize


def kv_bytes_per_slot(model: ModelConfig, itemsize: int) -> int:
    """Bytes of one slot: one token's key and value in every layer (ORCA 4.2)."""
    return 2 * model.n_layers * model.attention.kv_width * itemsize
