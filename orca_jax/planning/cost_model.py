"""The least memory traffic and arithmetic of an iteration, for benchmark floors, `orca plan` and simulation.

On one device each weight is read once, each activation is written and read once between operations, and each
visible key and value is read once. Norms, activation functions and residual sums count as fused into the
adjacent matrix products and cost nothing.

The decoder's work is counted first, then the encoder's.

A model may be split (ORCA 4.1) into stages of `layers`, and each layer over `n_shards` devices. The counts
are then those of one device of the stage; what it sends to the others is counted in device_traffic.py.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Literal, NamedTuple

from orca_jax.families.attention_config import Attention, Latent
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.parameters import (
    ENCODER,
    HEAD,
    TOKEN_EMBEDDING,
    Parameter,
    Stage,
    encoder_layer_parameters,
    encoder_layers_of,
    layer_parameters,
    outside_parameters,
    stage_elements,
)
from orca_jax.families.weight_form import DENSE, WeightForm, form_bytes

OperationKind = Literal["embed", "linear", "attention", "head", "sampler"]

_CROSS_KV, _CROSS_OUT, _EXPANDS = "cross_kv.weight", "cross_out.weight", "kv_b.weight"
_OF_QUERIES = ("q.weight", "q_a.weight", "q_b.weight", _EXPANDS)  # of latent attention
LOGIT_BYTES = 4  # logits are always float32


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation's memory traffic in bytes, and its floating-point operations."""

    kind: OperationKind
    n_bytes: float
    n_flops: float


@dataclass(frozen=True, slots=True)
class Device:
    """A device's rates: `bandwidth` in bytes/s and `matrix_rate` in floating-point operations/s."""

    bandwidth: float
    matrix_rate: float


class IterationSums(NamedTuple):
    """Sums over the requests of a batch, which determine an iteration's cost.

    There are `n_rows` requests, `n_tokens` input tokens, `n_keys` tokens in the cache after the iteration
    writes, and `n_seen` pairs of a query and a key it attends to. An operation's bytes and floating-point
    operations are linear in these.
    """

    n_rows: int
    n_tokens: int
    n_keys: int
    n_seen: int


_NO_ROWS = IterationSums(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class IterationShape:
    """The requests of one iteration, one entry each.

    `input_lengths` counts input tokens: all known tokens in prefill, one in decode. `kv_lengths` counts
    tokens in the cache, including the input tokens. `encoder_lengths`, in a model with an encoder, counts the
    tokens of the input that cross attention reads.
    """

    input_lengths: Sequence[int]
    kv_lengths: Sequence[int]
    encoder_lengths: Sequence[int] = ()

    def __post_init__(self) -> None:
        assert len(self.encoder_lengths) in (0, len(self.kv_lengths))
        pairs = zip(self.input_lengths, self.kv_lengths, strict=True)
        assert all(1 <= q <= k for q, k in pairs), "a row's input tokens are the last of its kv_length"

    @property
    def last_tokens(self) -> "IterationShape":
        """The same requests with the last input token of each."""
        return IterationShape([1] * len(self.kv_lengths), self.kv_lengths, self.encoder_lengths)

    def in_plain_form(self, latent: Latent) -> IterationSums:
        """The sums over the requests whose latent attention takes the plain form."""
        rows = zip(self.input_lengths, self.kv_lengths, strict=True)
        plain = [row for row in rows if latent.is_plain(*row)]
        return IterationShape([n for n, _ in plain], [length for _, length in plain]).sums()

    def crossed(self) -> IterationSums:
        """The sums for cross attention, in which every query sees all of its request's input."""
        lengths = self.encoder_lengths or [0] * len(self.input_lengths)
        n_seen = sum(q * k for q, k in zip(self.input_lengths, lengths, strict=True))
        return IterationSums(len(lengths), sum(self.input_lengths), sum(lengths), n_seen)

    def sums(self, window: int | None = None) -> IterationSums:
        """The sums over these requests, for a layer whose queries attend to at most `window` keys."""
        pairs = [*zip(self.input_lengths, self.kv_lengths, strict=True)]
        return IterationSums(
            n_rows=len(self.input_lengths),
            n_tokens=sum(self.input_lengths),
            n_keys=sum(k if window is None else min(k, q + window - 1) for q, k in pairs),
            n_seen=sum(keys_seen(q, k, window) for q, k in pairs),
        )


def keys_seen(n_input: int, kv_length: int, window: int | None = None) -> int:
    """Query-key pairs of one request: each query attends up to its own position; the last one to all keys.

    With a `window` each query attends to at most that many keys.
    """
    if window is not None and window < kv_length:
        full = min(n_input, kv_length - window + 1)  # queries that see a whole window
        fewer = n_input - full
        return full * window + keys_seen(fewer, kv_length - full)
    return n_input * (kv_length - n_input) + n_input * (n_input + 1) // 2


def operations(
    model: ModelConfig,
    shape: IterationShape | IterationSums,
    *,
    weight_bytes: int,
    kv_bytes: int,
    layers: range | None = None,
    n_shards: int = 1,
    in_both_forms: bool = False,
) -> list[Operation]:
    """The operations of one iteration in order, on one of the `n_shards` devices of a stage.

    `weight_bytes` is the size of an element of weights and activations, `kv_bytes` of an element of the KV
    cache unless the model holds it in eight bits. Each of the stage's `layers` (default: all) has its linear
    operations, with attention before the one that consumes its result. The embedding precedes the model's
    first layer; the head and the sampler follow its last. The last layer computes queries, keys and values of
    all tokens (in latent attention only keys and values); from its attention on, each request has one token.
    Sums do not tell how long an encoder's inputs are, so with sums cross attention reads nothing.
    `in_both_forms`: requests take the plain form of latent attention where the shape says that this is less
    work, as on CPUs.
    """
    layers = range(model.n_layers) if layers is None else layers
    sums = sums_of(shape)
    stage = stage_products(model, layers, n_shards)
    linear = partial(linear_operation, weight_bytes=weight_bytes)

    def layer(
        products: Sequence[_Product], own: Attention | None, *, last: bool = False
    ) -> Iterator[Operation]:
        plain, latent = _NO_ROWS, model.attention.latent
        window = None if own is None else own.scores.window if own.indexer is None else own.indexer.top_k
        if isinstance(shape, IterationShape):
            asked = shape.last_tokens if last else shape
            in_reach, crossed, scored = asked.sums(window), asked.crossed(), asked.sums(None)
            if in_both_forms and latent is not None:
                plain = asked.in_plain_form(latent)
        else:  # sums do not tell how many keys are within a window, so all count
            in_reach = sums._replace(n_tokens=sums.n_rows, n_seen=sums.n_keys) if last else sums
            crossed, scored = in_reach._replace(n_keys=0, n_seen=0), in_reach
        n_tokens = sums.n_tokens
        for product in products:
            if product.takes_attention:
                assert own is not None
                if own.indexer is not None and not own.indexer.shared:
                    yield _selection(own, n_shards, scored, weight_bytes=weight_bytes, kv_bytes=kv_bytes)
                yield attention_operation(
                    own,
                    n_shards,
                    crossed if product.crosses else in_reach,
                    n_written=0 if product.crosses or own.kv_from is not None else sums.n_tokens,
                    weight_bytes=weight_bytes,
                    kv_bytes=kv_bytes,
                    plain=plain,
                )
                n_tokens = in_reach.n_tokens
            of_all = in_reach.n_tokens if product.of_queries else n_tokens
            yield linear(product, of_all + (plain.n_keys - plain.n_tokens if product.expands else 0))

    result: list[Operation] = []
    if layers.start == 0:
        # Read a row of each table per token, and write the sum.
        n_embed_bytes = weight_bytes * sums.n_tokens * model.hidden_size
        n_embed_bytes += sums.n_tokens * sum(table.row_bytes(weight_bytes) for table in stage.tables)
        n_embed_flops = sums.n_tokens * model.hidden_size * max(0, len(stage.tables) - 1)
        result.append(Operation("embed", n_embed_bytes, n_embed_flops))
        result += [linear(product, sums.n_tokens) for product in stage.before]
    for products, own, count in stage.layers:
        result += [*layer(products, own)] * count
    if stage.head is not None:
        products, own, _ = stage.layers[-1]
        result[-len([*layer(products, own)]) :] = layer(products, own, last=True)
        result += [linear(product, sums.n_rows) for product in stage.after]
        local_vocab, n_in = stage.head.local_shape(n_shards)
        n_logit_bytes = LOGIT_BYTES * sums.n_rows * local_vocab
        n_head_bytes = stage.head.n_bytes(n_shards, weight_bytes) + weight_bytes * n_in * sums.n_rows
        n_head_bytes += n_logit_bytes
        result.append(Operation("head", n_head_bytes, 2 * sums.n_rows * n_in * local_vocab))
        vocab = model.padded_vocab_size  # each device samples from all logits
        result.append(Operation("sampler", LOGIT_BYTES * sums.n_rows * vocab, sums.n_rows * vocab))
    return result


def linear_operation(product: "_Product", n_tokens: int, *, weight_bytes: int) -> Operation:
    """A matrix product over `n_tokens` tokens. An expert's product has a row for each token that chooses it.

    Tokens are assumed to choose experts at random, so every device gets its share of them and reads the
    weights of the expected number of experts.
    """
    n_rows, n_read = float(n_tokens), 1.0
    if product.experts is not None:
        n_rows *= product.experts.top_k * product.share
        n_read = product.experts.expected_hit(n_tokens) * product.share
    n_activations = n_rows * (product.n_in + product.n_out)
    shape = product.shape
    n_bytes = form_bytes(product.form, shape, weight_bytes)
    each = n_bytes / math.prod(shape)  # the few biases count alike
    n_bytes = each * n_read * product.n_weights + weight_bytes * n_activations
    return Operation("linear", n_bytes, 2 * n_rows * product.n_in * product.n_out)


class _Product(NamedTuple):
    """A linear operation on one device, or one expert's; `n_weights` includes the bias.

    In latent attention the matrix that makes keys and values (`expands`) multiplies the queries and results,
    or in the plain form all tokens of the context. `share` is the fraction of the experts on the device. The
    matrix has `shape`, in `form`.
    """

    n_in: int
    n_out: int
    n_weights: int
    takes_attention: bool  # its input is the result of attention
    crosses: bool  # its input is the result of cross attention
    experts: Experts | None = None
    share: float = 1.0
    of_queries: bool = False  # computed only for the tokens that are queries
    expands: bool = False
    form: WeightForm = DENSE
    shape: tuple[int, ...] = ()


class _StageProducts(NamedTuple):
    """The matrices of a stage on one device.

    `tables` are the embedding tables. `layers` groups equal neighbouring layers: products,
    attention and count. `head` is the head's matrix. `encoder_tables` and `encoder` are the
    encoder's; `cross` are the products that make keys and values for cross attention, with their counts.
    """

    tables: tuple[Parameter, ...]
    before: tuple[_Product, ...]
    layers: tuple[tuple[tuple[_Product, ...], Attention | None, int], ...]
    after: tuple[_Product, ...]
    head: Parameter | None
    encoder_tables: tuple[Parameter, ...] = ()
    encoder: tuple[tuple[tuple[_Product, ...], int], ...] = ()
    cross: tuple[tuple[_Product, int], ...] = ()


@lru_cache(maxsize=4096)
def stage_products(model: ModelConfig, layers: range, n_shards: int) -> _StageProducts:
    """The matrices of the stage with these layers."""
    outside = outside_parameters(model, layers, shared=True)

    def product(parameter: Parameter, bias: Parameter | None = None, *, crosses: bool = False) -> _Product:
        n_out, n_in = parameter.local_stacked_shape(n_shards)
        n_biases = 0 if bias is None else math.prod(bias.local_shape(n_shards))
        return _Product(
            n_in,
            n_out,
            n_in * n_out + n_biases,
            parameter.takes_attention,
            crosses,
            form=parameter.form,
            shape=parameter.local_shape(n_shards),
        )

    def of_expert(parameter: Parameter, bias: Parameter | None, experts: Experts) -> _Product:
        n_experts, *outs, n_in = parameter.local_shape(n_shards)
        n_out = math.prod(outs)
        n_weights = n_in * n_out + (n_out if bias is not None else 0)
        share = n_experts / experts.number
        shape = (*outs, n_in)
        return _Product(
            n_in, n_out, n_weights, False, False, experts, share, form=parameter.form, shape=shape
        )

    def of_layer(parameters: Mapping[str, Parameter], layer: Layer) -> dict[str, _Product]:
        found: dict[str, _Product] = {}
        experts = layer.experts
        for name, parameter in parameters.items():
            bias = parameters.get(name.replace(".weight", ".bias"))
            if parameter.use == "linear":
                made = product(parameter, bias, crosses=name == _CROSS_OUT)
                found[name] = made._replace(of_queries=name in _OF_QUERIES, expands=name == _EXPANDS)
            elif parameter.use == "expert":
                assert experts is not None
                found[name] = of_expert(parameter, bias, experts)
        if not layer.mixes:
            found = {name: made._replace(of_queries=True) for name, made in found.items()}
        return found

    def projections(stage: Stage) -> tuple[_Product, ...]:
        return tuple(product(one) for one in outside.values() if one.use == "linear" and one.stage == stage)

    def tables(*, encoder: bool) -> tuple[Parameter, ...]:
        """The token embedding, and the encoder's or decoder's position embedding."""
        return tuple(
            one
            for name, one in outside.items()
            if one.use == "embedding" and (name == TOKEN_EMBEDDING or name.startswith(ENCODER) is encoder)
        )

    alike = [
        (
            of_layer(layer_parameters(model, group[0]), model.layers[group[0]]),
            model.layers[group[0]],
            len(group),
        )
        for group in ([*group] for _, group in groupby(layers, lambda i: model.layers[i]))
    ]
    read = () if model.encoder is None else model.encoder.layers
    encoder = [[*group] for _, group in groupby(encoder_layers_of(model, layers), lambda i: read[i])]
    head = None
    if layers.stop == model.n_layers:
        head = outside.get(HEAD) or outside[TOKEN_EMBEDDING]
    return _StageProducts(
        tables=tables(encoder=False),
        before=projections("first"),
        layers=tuple(
            (
                tuple(product for name, product in products.items() if name != _CROSS_KV),
                layer.attention,
                count,
            )
            for products, layer, count in alike
        ),
        after=projections("last"),
        head=head,
        encoder_tables=tables(encoder=True),
        encoder=tuple(
            (tuple(of_layer(encoder_layer_parameters(model, group[0]), read[group[0]]).values()), len(group))
            for group in encoder
        ),
        cross=tuple((products[_CROSS_KV], count) for products, _, count in alike if _CROSS_KV in products),
    )


def sums_of(shape: IterationShape | IterationSums) -> IterationSums:
    """The sums over a batch given either way."""
    return shape.sums() if isinstance(shape, IterationShape) else shape


def attention_operation(
    own: Attention,
    n_shards: int,
    sums: IterationSums,
    *,
    n_written: int,
    weight_bytes: int,
    kv_bytes: int,
    plain: IterationSums = _NO_ROWS,
) -> Operation:
    """One layer of split attention: queries in, keys and values written, visible ones read, results out.

    `sums` count the queries, and `n_written` the tokens whose keys and values are written. `plain` sums over
    the requests whose latent attention takes the plain form.
    """
    cached = replace(own, kv_from=None).cached_bytes(kv_bytes)  # of the layer whose keys these are
    read = replace(own, kv_from=None, indexer=None).cached_bytes(kv_bytes)  # index keys are read apart
    n_kv_bytes = cached // n_shards * n_written + read // n_shards * sums.n_keys
    around = (own.width + own.n_heads * own.value_size) // n_shards  # elements of a token: queries, results
    saved = 0  # elements of `around` that the plain form does not have
    if own.latent is not None:
        saved = around - own.n_heads * (own.latent.query_size + own.latent.value_size) // n_shards
    n_bytes = n_kv_bytes + (sums.n_tokens * around - plain.n_tokens * saved) * weight_bytes
    # 2 operations per element for a query and a key, 2 more for a weight and a value.
    return Operation("attention", n_bytes, 2 * (around * sums.n_seen - saved * plain.n_seen))


def _selection(
    own: Attention, n_shards: int, sums: IterationSums, *, weight_bytes: int, kv_bytes: int
) -> Operation:
    """The scores of all index keys that an indexer selects from; each device computes them all.

    `sums` count the queries, with every key before them.
    """
    indexer = own.indexer
    assert indexer is not None
    n_queries = indexer.n_heads * (indexer.head_size + 1)  # elements of a token's queries and their weights
    n_bytes = indexer.head_size * kv_bytes * sums.n_keys + n_queries * weight_bytes * sums.n_tokens
    return Operation("attention", n_bytes, 2 * n_queries * sums.n_seen)


def floor(operations: Iterable[Operation], device: Device) -> float:
    """The least seconds in which `device` can run these operations one after the other.

    It sums max(bytes / bandwidth, operations / matrix rate).
    """
    return sum(max(op.n_bytes / device.bandwidth, op.n_flops / device.matrix_rate) for op in operations)


def parameter_count(model: ModelConfig) -> int:
    """The number of elements of all weights, including the vocabulary's padding."""
    return stage_elements(model, range(model.n_layers), 1)


def encoder_operations(
    model: ModelConfig,
    lengths: Sequence[int],
    *,
    weight_bytes: int,
    kv_bytes: int,
    layers: range | None = None,
    n_shards: int = 1,
) -> list[Operation]:
    """The operations for encoder inputs of these `lengths` on a device of a stage; see `operations`.

    The first stage runs the encoder. Every stage then makes the keys and values that the cross attention of
    its `layers` reads, and writes them to the cache.
    """
    layers = range(model.n_layers) if layers is None else layers
    stage = stage_products(model, layers, n_shards)
    n_tokens = sum(lengths)
    sums = IterationSums(len(lengths), n_tokens, n_tokens, sum(length**2 for length in lengths))
    attention = partial(
        attention_operation,
        model.attention,
        n_shards,
        n_written=n_tokens,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )
    result: list[Operation] = []
    if layers.start == 0 and stage.encoder:
        n_embed_bytes = weight_bytes * n_tokens * model.hidden_size
        n_embed_bytes += n_tokens * sum(table.row_bytes(weight_bytes) for table in stage.encoder_tables)
        n_embed_flops = n_tokens * model.hidden_size * (len(stage.encoder_tables) - 1)
        result.append(Operation("embed", n_embed_bytes, n_embed_flops))
    for products, count in stage.encoder:
        within: list[Operation] = []
        for product in products:
            if product.takes_attention:
                within.append(attention(sums=sums))
            within.append(linear_operation(product, n_tokens, weight_bytes=weight_bytes))
        result += within * count
    for product, count in stage.cross:
        made = linear_operation(product, n_tokens, weight_bytes=weight_bytes)
        result += [made, attention(sums=IterationSums(0, 0, 0, 0))] * count
    return result


def encoder_shared_bytes(
    model: ModelConfig, n_tokens: int, *, weight_bytes: int, layers: range | None = None, n_shards: int = 1
) -> float:
    """Bytes that each device of a stage sends to the others for inputs of `n_tokens` in all."""
    layers = range(model.n_layers) if layers is None else layers
    encoding = encoder_layers_of(model, layers)
    n_sums = 2 * len(encoding) + bool(encoding)
    return 2 * (n_shards - 1) / n_shards * n_sums * weight_bytes * n_tokens * model.hidden_size
