"""The collectives that slice tokens over a stage's devices, and send tokens between devices."""

import jax
import jax.numpy as jnp
from jax import lax


def scattered(x: jax.Array, axis: str) -> jax.Array:
    """Sum [n S, H] over devices, and give each its slice [S, H]."""
    return lax.psum_scatter(x, axis, tiled=True)


def gathered(x: jax.Array, axis: str) -> jax.Array:
    """Stack all devices' slices [S, H]."""
    return lax.all_gather(x, axis, tiled=True)


def send_ragged(rows: jax.Array, counts: jax.Array, *, most: int, n_received: int, axis: str) -> jax.Array:
    """Implement model.shard.Send with XLA's ragged all-to-all, which needs no padding; CPUs have none."""
    me = lax.axis_index(axis)
    first = jnp.cumsum(counts, axis=1) - counts  # where the rows for each device begin on the sender
    place = jnp.cumsum(counts, axis=0) - counts  # and on the receiver
    empty = jnp.zeros((n_received, rows.shape[1]), rows.dtype)
    return lax.ragged_all_to_all(rows, empty, first[me], counts[me], place[me], counts[:, me], axis_name=axis)


def send_padded(rows: jax.Array, counts: jax.Array, *, most: int, n_received: int, axis: str) -> jax.Array:
    """Implement model.shard.Send with an all-to-all of `most` rows between any two devices."""
    me = lax.axis_index(axis)
    first = jnp.cumsum(counts, axis=1) - counts
    place = jnp.cumsum(counts, axis=0) - counts
    row = jnp.arange(most)
    blocks = rows.at[first[me][:, None] + row].get(mode="clip")  # [n, most, H]; more than there are
    blocks = lax.all_to_all(blocks, axis, 0, 0)
    to = jnp.where(row < counts[:, me, None], place[:, me, None] + row, n_received)
    received = jnp.zeros((n_received, rows.shape[1]), rows.dtype)
    return received.at[to].set(blocks, mode="drop")
