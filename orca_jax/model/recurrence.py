"""Rows and kernels of recurrent layers: selective batching (ORCA 3.2) for layers that keep a state.

A recurrence runs over a token-major array, in which rows differ in length and phase. The functions are pure:
linear_attention.py and causal_convolution.py take inputs [T, ...], the iteration's Rows and the states
[n_states, ...], and return outputs [T, ...] and the new states. `RecurrentKernels` may take their place.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Heads(NamedTuple):
    """The inputs of linear attention; a state space has its C, B and inputs times steps, and no `beta`.

    Each of the N heads of queries and keys serves as many of the M heads of values.
    """

    q: jax.Array  # [T, N, K]
    k: jax.Array  # [T, N, K]
    v: jax.Array  # [T, M, V]
    decay: jax.Array  # [T, M], at most 0
    beta: jax.Array | None = None  # [T, M]


class RowTable(NamedTuple):
    """The arrays that say which tokens and which state are a row's, as kernels take them.

    Tokens from `row_start[-1]` on are padding, and rows without tokens too; neither may touch a state.
    """

    row_start: jax.Array  # [R + 1] int32 index of each row's first token, then the number of tokens
    state_of_row: jax.Array  # [R] int32 index of the request's state; n_states (out of range) for padding
    starts: jax.Array  # [R] bool: the row's first token is its request's first, so its state is all zeros
    kept: (
        jax.Array | None
    )  # [T] int32 place of the state after each token, n_states for none; None: no drafts

    @property
    def length(self) -> jax.Array:
        """Tokens of each row [R]."""
        return self.row_start[1:] - self.row_start[:-1]

    def drafted(self, n_states: int) -> jax.Array:
        """The rows that are drafted [R]: their states between tokens are kept."""
        if self.kept is None:
            return jnp.zeros_like(self.starts)
        return (self.length > 1) & (self.kept.at[self.row_start[:-1]].get(mode="clip") < n_states)

    def carried(self, state: jax.Array) -> jax.Array:
        """Each row's part of a state array [n_states, ...], zeros where its request starts: [R, ...]."""
        own = state.at[self.state_of_row].get(mode="clip")
        return jnp.where(self.starts.reshape(-1, *(1 for _ in own.shape[1:])), 0, own)

    def replaced(self, state: jax.Array, new: jax.Array) -> jax.Array:
        """Write the rows' new states [R, ...] back into the array [n_states, ...]."""
        return state.at[self.state_of_row].set(new.astype(state.dtype), mode="drop")


class RecurrentKernels(NamedTuple):
    """Kernels in place of XLA's operations; None for these. Their numbers are all float32.

    `linear_attention` takes Heads, the states [n_states, M, K, V] and the rows, and returns None for sizes
    that it does not take. `convolution` takes the arguments of `causal_convolution`.
    """

    linear_attention: Callable[[Heads, jax.Array, RowTable], tuple[jax.Array, jax.Array] | None] | None = None
    convolution: (
        Callable[[jax.Array, jax.Array, jax.Array | None, jax.Array, RowTable], tuple[jax.Array, jax.Array]]
        | None
    ) = None


class Kept(NamedTuple):
    """Places of the states after drafted rows' tokens, whose drafts may be rejected.

    In a drafted row each token but the last has a place, and no token of another row has one. A row has up to
    `most` places, and a batch fewer than R.
    """

    token: jax.Array  # [R] int32
    at: jax.Array  # [R] int32 the place of the state after this token; n_states (out of range) for none
    most: int


class Rows(NamedTuple):
    """The rows of an iteration as recurrent layers see them: neighbouring tokens of one request are one row.

    The arrays but `row_of_token` are those of RowTable.
    """

    row_start: jax.Array
    row_of_token: jax.Array  # [T] int32; R (out of range) for padding
    state_of_row: jax.Array
    starts: jax.Array
    one_each: bool = False  # each row is one token, row r token r, as in decode; the other rows are padding
    kept: Kept | None = None
    kernels: RecurrentKernels = RecurrentKernels()

    def table(self, n_states: int) -> RowTable:
        """The arrays, for a layer with `n_states` states."""
        places = None
        if self.kept is not None:
            places = jnp.full(len(self.row_of_token), n_states, jnp.int32)
            places = places.at[self.kept.token].set(self.kept.at)
        return RowTable(self.row_start, self.state_of_row, self.starts, places)
