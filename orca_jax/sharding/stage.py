"""The jitted programs of one stage: the forward pass and the samplers, one of each per bucket.

They are apart so that a forward pass can go ahead while the choice of the previous token still waits for the
host. What one iteration needs from the host comes as a single int32 buffer.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from orca_jax.config import ModelConfig
from orca_jax.flat_batch import FlatLayout, Sampler
from orca_jax.model.gpt import GPT, Parameters
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.sampler import greedy, sample
from orca_jax.sharding.attention_path import AttentionPath


class Stage:
    """The programs of a model on one device.

    `parameters` are those of `model.gpt.parameter_shapes`, as arrays, or as jax.ShapeDtypeStruct to compile
    without them. The buffer of an iteration is that of its FlatLayout with `attention`'s words behind it.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, *, attention: AttentionPath) -> None:
        self.config = config
        graph, state = nnx.split(GPT(config, parameters))
        # A flat tuple: each call passes every weight, and a deep tree costs the host more at each.
        self.weights, tree = jax.tree.flatten(state)

        def forward(
            weights: list[jax.Array],
            caches: list[LayerCache],
            last_token: jax.Array,
            buffer: jax.Array,
            *,
            layout: FlatLayout,
        ) -> tuple[jax.Array, list[LayerCache]]:
            model = nnx.merge(graph, jax.tree.unflatten(tree, weights))
            batch = layout.split(buffer)
            words = buffer[layout.size :]
            return model(
                jnp.where(
                    batch.take_last == 1, last_token.at[batch.last_row].get(mode="clip"), batch.token_ids
                ),
                batch.positions,
                batch.slot_of_token,
                jnp.maximum(batch.row_start[1:] - 1, 0),
                caches,
                attention.bind(layout, batch, words),
            )

        self.forward = jax.jit(forward, static_argnames="layout", donate_argnames="caches")
        self.choose = jax.jit(_choose, static_argnames=("layout", "sampler"), donate_argnames="last_token")


def _choose(
    logits: jax.Array, last_token: jax.Array, buffer: jax.Array, *, layout: FlatLayout, sampler: Sampler
) -> tuple[jax.Array, jax.Array]:
    """The next token of each row [R] int32, and last_token with them in their places."""
    batch = layout.split(buffer)
    if sampler == "greedy":
        tokens = greedy(logits)
    else:
        as_float = partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
        tokens = sample(
            logits,
            as_float(batch.temperature),
            batch.top_k,
            as_float(batch.top_p),
            batch.seed_low,
            batch.seed_high,
            batch.token_index,
            cut=sampler == "full",
        )
    return tokens, last_token.at[batch.row].set(tokens, mode="drop")
