"""Linear attention: a state [K, V] for each head instead of a cache, in the two forms that models have.

For each token, with a query q and key k [K], a value v [V] and a decay a <= 0, a head computes

    gated delta rule (Yang et al., 2024):    S <- exp(a) S;  S <- S + k (beta (v - k S));  result q S
    state space (Mamba-2, Dao & Gu, 2024):   S <- exp(a) S + k v;  result q S

where the keys of a state space are its B, the queries its C, and the values its inputs times their step.
Everything is float32.

Rows differ in length and phase (selective batching, ORCA 3.2). A kernel may run them all, as on CPUs
(native/linear_attention.c). Without one a batch of one token a row takes one step for all rows. So do drafted
rows, one token after the other, as the states between their tokens are kept.
Otherwise a row's tokens are taken in chunks, each by a few matrix products: with D[i, j] =
exp(a_j+1 + ... + a_i), u the values that the state takes in, and exp(A) the decay since the chunk's start,

    results exp(A) (q S) + (q k^T * D) u,    new state exp(A_last) S + (D[last] * k)^T u

In a state space u is v; in the delta rule it solves a triangular system, u_i + sum_j<i beta_i D[i, j] (k_i .
k_j) u_j = beta_i (v_i - exp(A_i) k_i S).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from orca_jax.model.recurrence import Heads, Rows, RowTable

_LONG, _SHORT = 64, 16  # tokens of a chunk; what is left of a row after long chunks takes short ones
_EXACT = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}


class _Inputs(NamedTuple):
    """Heads of tokens, or of one token of each row, in which those of values are grouped."""

    q: jax.Array  # [T, N, K] float32
    k: jax.Array  # [T, N, K]
    v: jax.Array  # [T, N, G, V]
    decay: jax.Array  # [T, N, G]
    beta: jax.Array | None  # [T, N, G]; None in a state space


def linear_attention(x: Heads, state: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Run the gated delta rule over the rows, or without `beta` Mamba-2's recurrence.

    `state` [n_states, M, K, V] float32 has each request's state. Returns the results [T, M, V] float32,
    anything for padding tokens, and the new states.
    """
    x, table = jax.tree.map(lambda each: each.astype(jnp.float32), x), rows.table(len(state))
    kernel = rows.kernels.linear_attention
    done = None if kernel is None else kernel(x, state, table)
    if done is not None:
        return done
    grouped = _grouped(x)
    by_group = state.reshape(len(state), *grouped.v.shape[1:3], *state.shape[2:])
    if rows.one_each:
        out, by_group = _steps_at_once(grouped, by_group, table)
    else:
        default = _chunks_at_once
        if rows.kept is not None:
            default = partial(_drafts_at_once, most=rows.kept.most)
        # A CPU without the native kernel computes no padded chunks, which a batch of one prompt and many
        # decodes is full of.
        cpu = _chunks_in_turn
        out, by_group = lax.platform_dependent(grouped, by_group, table, cpu=cpu, default=default)
    return out.reshape(x.v.shape), by_group.reshape(state.shape)


def _grouped(x: Heads) -> _Inputs:
    n = x.q.shape[1]
    of_values = x.v, x.decay, x.beta
    return _Inputs(
        x.q, x.k, *jax.tree.map(lambda each: each.reshape(len(each), n, -1, *each.shape[2:]), of_values)
    )


def _step(x: _Inputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of each of R rows, with states [R, N, G, K, V]: results [R, N, G, V], new states."""
    decay = jnp.exp(x.decay)[..., None]
    u = x.v
    if x.beta is not None:
        u = x.beta[..., None] * (u - decay * (x.k[:, :, None, :, None] * state).sum(-2))
    new = decay[..., None] * state + x.k[:, :, None, :, None] * u[..., None, :]
    return (x.q[:, :, None, :, None] * new).sum(-2), new


def _chunk(x: _Inputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The tokens of one chunk, with the row's state [N, G, K, V]: results [C, N, G, V], new state."""
    place = jnp.arange(len(x.q))
    up_to = (place[:, None] >= place).astype(jnp.float32)  # [i, l] whether token l is i or before it
    decay = jnp.moveaxis(x.decay, 0, -1)  # [N, G, C]
    # Sums of the decays after j up to i. Differences of sums since the chunk's start would lose their digits.
    after = decay[..., None] * (place[:, None] > place)  # [N, G, l, j]
    sums = jnp.einsum("il,nglj->ngij", up_to, after, **_EXACT)
    between = up_to * jnp.exp(sums)  # D
    since_start = jnp.exp(jnp.cumsum(decay, axis=-1))[..., None]
    u = jnp.moveaxis(x.v, 0, 2)  # [N, G, C, V]
    if x.beta is not None:
        beta = jnp.moveaxis(x.beta, 0, 2)[..., None]
        of_state = jnp.einsum("cnk,ngkv->ngcv", x.k, state, **_EXACT)
        alike = jnp.einsum("cnk,dnk->ncd", x.k, x.k, **_EXACT)[:, None]
        u = lax.linalg.triangular_solve(
            beta * between * alike,
            beta * (u - since_start * of_state),
            left_side=True,
            lower=True,
            unit_diagonal=True,
        )
    scores = between * jnp.einsum("cnk,dnk->ncd", x.q, x.k, **_EXACT)[:, None]
    out = since_start * jnp.einsum("cnk,ngkv->ngcv", x.q, state, **_EXACT)
    out += jnp.einsum("ngcd,ngdv->ngcv", scores, u, **_EXACT)
    added = jnp.einsum("cnk,ngcv->ngkv", x.k, between[..., -1, :, None] * u, **_EXACT)
    return jnp.moveaxis(out, 2, 0), since_start[..., -1:, :] * state + added


def _steps_at_once(x: _Inputs, state: jax.Array, table: RowTable) -> tuple[jax.Array, jax.Array]:
    out, new = _step(x, table.carried(state))
    return out, table.replaced(state, new)


def _chunks_in_turn(x: _Inputs, state: jax.Array, table: RowTable) -> tuple[jax.Array, jax.Array]:
    """Each row in long chunks, then short ones, for CPUs: loops whose trip counts the device reads."""
    drafted = table.drafted(len(state))
    length = jnp.where(drafted, 0, table.length)
    n_long, rest = length // _LONG, length % _LONG
    n_single = (rest % _SHORT == 1).astype(jnp.int32)
    n_short = -(-(rest - n_single) // _SHORT)
    n_single = jnp.where(drafted, table.length, n_single)
    padded = jax.tree.map(lambda each: jnp.pad(each, [(0, _SHORT)] + [(0, 0)] * (each.ndim - 1)), x)
    done = (jnp.zeros_like(padded.v), state)
    first = table.row_start[:-1]
    if len(x.v) >= _LONG:
        done = _walked(padded, done, table, size=_LONG, first=first, n_chunks=n_long)
        first = first + n_long * _LONG
    done = _walked(padded, done, table, size=_SHORT, first=first, n_chunks=n_short)
    out, state = _walked(padded, done, table, size=1, first=first + n_short * _SHORT, n_chunks=n_single)
    return out[: len(x.v)], state


def _walked(
    x: _Inputs,
    done: tuple[jax.Array, jax.Array],
    table: RowTable,
    *,
    size: int,
    first: jax.Array,
    n_chunks: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run `n_chunks` [R] chunks of `size` tokens of each row, from token `first` [R] on, one after the other.

    `done` are the results [T, N, G, V], and the states. Where the row ends inside its last chunk, the
    tokens after it neither change the state nor get a result.
    """
    chunks_until = jnp.cumsum(n_chunks)
    n_states = len(done[1])

    def run(i: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, state = done
        row = (i >= chunks_until).sum()
        begin = first[row] + (i - chunks_until[row] + n_chunks[row]) * size
        of_row, n_real = table.state_of_row[row], table.row_start[row + 1] - begin
        at = into = of_row
        is_first = begin == table.row_start[row]
        if size == 1 and table.kept is not None:  # drafted tokens go from one place to the next
            before, into = table.kept[jnp.maximum(begin - 1, 0)], table.kept[begin]
            at = jnp.where(is_first | (before == n_states), at, before)
            into = jnp.where(into == n_states, of_row, into)
        found = lax.dynamic_index_in_dim(state, at, keepdims=False)
        own = jnp.where(table.starts[row] & is_first, 0, found)
        part = jax.tree.map(lambda each: lax.dynamic_slice_in_dim(each, begin, size), x)
        if size == 1:
            result, new = _step(part, own[None])
            new = new[0]
        else:
            result, new = _chunk(_only(part, jnp.arange(size) < n_real), own)
            before = lax.dynamic_slice_in_dim(out, begin, size)
            result = jnp.where((jnp.arange(size) < n_real)[:, None, None, None], result, before)
        new = jnp.where(of_row < n_states, new, found)
        out = lax.dynamic_update_slice_in_dim(out, result, begin, 0)
        return out, lax.dynamic_update_index_in_dim(state, new, into, 0)

    return lax.fori_loop(0, chunks_until[-1], run, done)


def _only(x: _Inputs, real: jax.Array) -> _Inputs:
    """The inputs with zeros in place of tokens that are not `real` [..., C], which then change nothing."""

    def kept(each: jax.Array) -> jax.Array:
        return jnp.where(real.reshape(*real.shape, *(1 for _ in each.shape[real.ndim :])), each, 0)

    return jax.tree.map(kept, x)


def _chunks_at_once(x: _Inputs, state: jax.Array, table: RowTable) -> tuple[jax.Array, jax.Array]:
    """All rows' first chunks at once, then their second ones, and so on: static shapes, for GPUs.

    Rows of one token take a step. The longer a row is, the earlier it comes; so chunk i concerns only the
    first T / (i C + 1) rows, and a loop over chunks 2^j to 2^(j+1) - 1 computes as many of each.
    """
    n_tokens, n_rows = len(x.q), len(table.starts)
    own, length = table.carried(state), table.length
    last = jnp.maximum(table.row_start[1:] - 1, 0)
    stepped, after_step = _step(jax.tree.map(lambda each: each.at[last].get(mode="clip"), x), own)
    out = jnp.zeros_like(x.v).at[jnp.where(length == 1, last, n_tokens)].set(stepped, mode="drop")
    order = jnp.argsort(-length)
    first, long, carried = table.row_start[:-1][order], length[order], own[order]

    def run(i: jax.Array | int, done: tuple[jax.Array, jax.Array], n: int) -> tuple[jax.Array, jax.Array]:
        out, carried = done
        token = i * _LONG + jnp.arange(_LONG)
        real = token < long[:n, None]  # [n, C]
        index = jnp.where(real, first[:n, None] + token, n_tokens)
        part = jax.tree.map(lambda each: each.at[index].get(mode="clip"), x)
        result, new = jax.vmap(_chunk)(_only(part, real), carried[:n])
        return out.at[index].set(result, mode="drop"), carried.at[:n].set(new)

    done, begin, n_chunks = (out, carried), 0, -(-n_tokens // _LONG)
    while begin < n_chunks:
        end = min(2 * begin, n_chunks) if begin else 1
        n = min(n_rows, n_tokens // max(2, begin * _LONG + 1))
        done = lax.fori_loop(begin, end, lambda i, done, n=n: run(i, done, n), done) if n else done
        begin = end
    out, carried = done
    in_chunks = jnp.zeros_like(own).at[order].set(carried)
    single = (length == 1).reshape(-1, 1, 1, 1, 1)
    return out, table.replaced(state, jnp.where(single, after_step, in_chunks))


def _drafts_at_once(
    x: _Inputs, state: jax.Array, table: RowTable, *, most: int
) -> tuple[jax.Array, jax.Array]:
    """_chunks_at_once with drafted rows: all their first tokens in a step, then all second ones.

    A row has up to `most` drafts. Chunks' results of drafted rows are replaced. These have at least two
    tokens each and R in all at the most, so step i concerns up to R / (i + 1) rows, the longest.
    """
    n_tokens, n_rows, n_states = len(x.q), len(table.starts), len(state)
    assert table.kept is not None
    carried = table.carried(state)
    out, state = _chunks_at_once(x, state, table)
    length = jnp.where(table.drafted(n_states), table.length, 0)
    order = jnp.argsort(-length)
    first, length, place, carried = (
        each[order] for each in (table.row_start[:-1], length, table.state_of_row, carried)
    )
    for i in range(most + 1):
        n = n_rows // max(2, i + 1)
        real = i < length[:n]
        token = jnp.where(real, first[:n] + i, n_tokens)
        result, carried = _step(
            jax.tree.map(lambda each, token=token: each.at[token].get(mode="clip"), x), carried[:n]
        )
        into = table.kept.at[token].get(mode="fill", fill_value=n_states)
        into = jnp.where(real & (i + 1 == length[:n]), place[:n], into)
        out = out.at[token].set(result, mode="drop")
        state = state.at[into].set(carried, mode="drop")
    return out, state
