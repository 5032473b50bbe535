"""The jitted programs of one stage: a forward pass for each bucket, samplers for each number of rows.

They are apart so that a forward pass can go ahead while the choice of the previous token still waits for the
host. What one iteration needs from the host comes as a single int32 buffer.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from orca_jax.config import ModelConfig
from orca_jax.flat_batch import FlatLayout, Sampler, SamplerArrays
from orca_jax.model.gpt import GPT, Parameters
from orca_jax.model.kv_cache import LayerCache
from orca_jax.model.sampler import greedy, sample
from orca_jax.sharding.attention_path import AttentionPath
from orca_jax.sharding.partition import StagePart
from orca_jax.sharding.specs import CACHE_SPEC


class Stage:
    """The programs of one stage's layers on its devices.

    `parameters` are those of `part.placement`, where that says, as arrays, or as jax.ShapeDtypeStruct with a
    sharding to compile without them. The buffer of an iteration is that of its FlatLayout with `attention`'s
    words behind it.

    `forward(weights, caches, arrived, buffer, layout=)` gives (out, caches). `arrived` is the hidden array
    [T, H] of the stage before; for the first stage last_token [n_rows] where it is the only one, else None:
    the tokens come from the host then. `out` is the hidden array [T, H], or from the last stage the logits
    [R, V] float32 and the buffer's SamplerArrays [7, R].

    `choose(logits, rows, last_token, sampler=)` takes the latter two, whatever the bucket was: there is one
    program of each sampler for each R.
    """

    def __init__(
        self, config: ModelConfig, parameters: Parameters, part: StagePart, *, attention: AttentionPath
    ) -> None:
        self.part = part
        graph, state = nnx.split(GPT(config, parameters, part.layers))
        # A flat tuple: each call passes every weight, and a deep tree costs the host more at each.
        self.weights, tree = jax.tree.flatten(state)
        group = part.group

        def one_part(
            weights: list[jax.Array],
            caches: list[LayerCache],
            arrived: jax.Array | None,
            buffer: jax.Array,
            *,
            layout: FlatLayout,
        ) -> tuple[jax.Array, list[LayerCache]]:
            """What one device of the stage computes."""
            model, shard = nnx.merge(graph, jax.tree.unflatten(tree, weights)), group.shard()
            batch = layout.split(buffer)
            if part.first:
                token_ids = batch.token_ids
                if arrived is not None:
                    last = arrived.at[batch.last_row].get(mode="clip")
                    token_ids = jnp.where(batch.take_last == 1, last, token_ids)
                x = model.embed(token_ids, batch.positions, shard)
            else:
                assert arrived is not None
                x = arrived
            attend = attention.bind(layout, batch, buffer[layout.size :])
            x, caches = model.through(x, batch.slot_of_token, caches, attend, shard)
            if part.last:
                x = model.logits(x, jnp.maximum(batch.row_start[1:] - 1, 0), shard)
            return x, caches

        def forward(*arrays: Any, layout: FlatLayout) -> tuple[Any, list[LayerCache]]:
            compute = partial(one_part, layout=layout)
            if len(group) > 1:
                specs = [weight.sharding.spec for weight in self.weights]
                # Not checked (check_vma): Pallas kernels and what is gathered do not say over which axes
                # their results vary.
                compute = jax.shard_map(
                    compute,
                    mesh=group.mesh,
                    in_specs=(specs, CACHE_SPEC, P(), P()),
                    out_specs=(P(), CACHE_SPEC),
                    check_vma=False,
                )
            out, caches = compute(*arrays)
            if part.last:
                rows = arrays[-1][layout.sampler_words].reshape(-1, layout.n_rows)
                return (out, rows), caches
            return out, caches

        self.forward = jax.jit(forward, static_argnames="layout", donate_argnums=1)  # the caches
        self.choose = jax.jit(_choose, static_argnames="sampler", donate_argnames="last_token")


def _choose(
    logits: jax.Array, rows: jax.Array, last_token: jax.Array, *, sampler: Sampler
) -> tuple[jax.Array, jax.Array]:
    """The next token of each row [R] int32, and last_token with them in their places."""
    batch = SamplerArrays(*rows)
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
