"""The causal convolution of recurrent layers, over rows of different lengths and phases in one iteration."""

import jax
import jax.numpy as jnp

from orca_jax.model.recurrence import Rows


def causal_convolution(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, state: jax.Array, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel of x [T, C] over the last W tokens of its request.

    `weight` [C, W] has the newest token's column last; `bias` is [C]. `state` [n_states, 1, W - 1, C] has
    the inputs before the row's first token, the newest last. Returns the sums [T, C] float32, and the new
    state.
    """
    n_tokens, n_kept, table = x.shape[0], weight.shape[1] - 1, rows.table(len(state))
    kernel = rows.kernels.convolution
    if kernel is not None and x.dtype == state.dtype == jnp.float32:
        addend = None if bias is None else bias.astype(jnp.float32)
        return kernel(x, weight.astype(jnp.float32), addend, state, table)
    state = state[:, 0]
    n_rows = rows.state_of_row.shape[0]
    carried = table.carried(state)  # [R, W - 1, C]
    before = carried.reshape(n_rows * n_kept, -1).astype(x.dtype)
    row = jnp.minimum(rows.row_of_token, n_rows - 1)
    offset = jnp.arange(n_tokens) - rows.row_start[row]  # of a token in its row
    wide = weight.astype(jnp.float32)
    y = x.astype(jnp.float32) * wide[:, n_kept]
    for back in range(1, n_kept + 1):
        in_row = jnp.pad(x, ((back, 0), (0, 0)))[:n_tokens]  # the token `back` places earlier
        in_state = before.at[row * n_kept + jnp.minimum(n_kept + offset - back, n_kept - 1)].get(mode="clip")
        earlier = jnp.where((offset >= back)[:, None], in_row, in_state)
        y = y + earlier.astype(jnp.float32) * wide[:, n_kept - back]
    if bias is not None:
        y = y + bias.astype(jnp.float32)

    def newest(end: jax.Array, begin: jax.Array, carried: jax.Array) -> jax.Array:
        """The inputs before tokens `end` [R] of rows that begin at `begin` with states `carried`."""
        # Place k of the new state is the token at end - (W - 1) + k, or in a shorter row what it carried.
        place = jnp.arange(n_kept)
        token = end[:, None] - n_kept + place  # [R, W - 1]
        at = jnp.minimum(place + (end - begin)[:, None], n_kept - 1)
        old = jnp.take_along_axis(carried, at[:, :, None], axis=1)
        new = x.at[token].get(mode="clip").astype(state.dtype)
        return jnp.where((token >= begin[:, None])[:, :, None], new, old)

    new = table.replaced(state, newest(rows.row_start[1:], rows.row_start[:-1], carried))
    if rows.kept is not None:
        of_kept = row[rows.kept.token]
        after = newest(rows.kept.token + 1, rows.row_start[of_kept], carried[of_kept])
        new = new.at[rows.kept.at].set(after, mode="drop")
    return y, new[:, None]
