"""The least memory traffic and arithmetic of the encoder in an iteration; cost_model.py counts the rest."""

from collections.abc import Sequence
from functools import partial

from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import encoder_layers_of
from orca_jax.planning.cost_model import (
    IterationSums,
    Operation,
    attention_operation,
    linear_operation,
    stage_products,
)


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
        n_embed_bytes = weight_bytes * n_tokens * (sum(stage.encoder_tables) + model.hidden_size)
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
