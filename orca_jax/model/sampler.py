"""The choice of each row's next token, a program of its own apart from the forward pass.

Three programs, smallest first: `greedy`, `plain` (temperature), `full` (top_k and top_p too). A row's draw
depends on its own logits, seed and token index alone, so a request's tokens do not depend on its neighbours.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_GROUP = 256  # logits summed together in the first step of a draw


def greedy(logits: jax.Array) -> jax.Array:
    """[R, V] float32 to [R] int32: the first of the largest."""
    # Two plain reductions: argmax, which carries value and index, does not vectorise on the CPU.
    top = logits.max(axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(logits == top, index, logits.shape[-1] - 1).min(axis=-1)


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    seed_low: jax.Array,
    seed_high: jax.Array,
    token_index: jax.Array,
    *,
    cut: bool,
) -> jax.Array:
    """Draw a token of each row: logits [R, V] float32, the rest [R]; returns [R] int32.

    Temperature first, then top_k, then top_p of what top_k left. Rows of temperature 0 are greedy. `cut`
    False leaves top_k and top_p out of the program.
    """
    hot = jnp.where(temperature > 0, temperature, 1.0)
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / hot[:, None]
    weights = jnp.exp(scaled)
    if cut:
        weights = _keep_top_p(_keep_top_k(weights, top_k), top_p)
    uniform = jax.vmap(_uniform)(seed_low, seed_high, token_index)
    return jnp.where(temperature > 0, _draw(weights, uniform), greedy(logits))


def _uniform(seed_low: jax.Array, seed_high: jax.Array, token_index: jax.Array) -> jax.Array:
    """One number in [0, 1), of (seed, token index)."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed_low), seed_high)
    return jax.random.uniform(jax.random.fold_in(key, token_index))


def _draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index at which the running sum of weights [R, V] passes uniform [R] of the total.

    First among sums of groups, then inside the group, so that no running sum of V terms is made.
    """
    n_rows, vocab = weights.shape
    grouped = jnp.pad(weights, ((0, 0), (0, -vocab % _GROUP))).reshape(n_rows, -1, _GROUP)
    sums = grouped.sum(axis=-1)
    before_group = jnp.cumsum(sums, axis=-1)
    group, rest = _pass(before_group, sums, uniform * before_group[:, -1])
    inside = jnp.take_along_axis(grouped, group[:, None, None], axis=1)[:, 0]
    member, _ = _pass(jnp.cumsum(inside, axis=-1), inside, rest)
    return (group * _GROUP + member).astype(jnp.int32)


def _pass(running: jax.Array, terms: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index [R] whose running sum exceeds target and whose term is above 0; the target's rest there."""
    fits = (running > target[:, None]) & (terms > 0)
    # Rounding can leave the target at or above the last sum: take the last term that has weight then.
    last = terms.shape[-1] - 1 - jnp.argmax(terms[:, ::-1] > 0, axis=-1)
    index = jnp.where(fits.any(axis=-1), jnp.argmax(fits, axis=-1), last)
    here = jnp.take_along_axis(running - terms, index[:, None], axis=-1)[:, 0]
    return index, jnp.maximum(target - here, 0.0)


def _keep_top_k(weights: jax.Array, top_k: jax.Array) -> jax.Array:
    """Zero all but the k largest weights (ties stay in); k 0 keeps all."""
    wanted = jnp.where(top_k > 0, top_k, weights.shape[-1])
    bound = _largest_bound(weights, lambda kept: kept.sum(axis=-1, dtype=jnp.int32) >= wanted)
    return jnp.where(weights >= bound[:, None], weights, 0.0)


def _keep_top_p(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """Zero all but the fewest largest weights whose share is at least p (ties stay in); p 1 keeps all."""
    wanted = top_p * weights.sum(axis=-1)
    bound = _largest_bound(weights, lambda kept: jnp.where(kept, weights, 0.0).sum(axis=-1) >= wanted)
    return jnp.where((weights >= bound[:, None]) | (top_p >= 1)[:, None], weights, 0.0)


def _largest_bound(weights: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest bound [R] for which `enough(weights >= bound)` still holds, weights in [0, 1].

    A search over the bits of a float32, which sort as the numbers do: 31 passes over the logits and no sort.
    """

    def halve(_: int, span: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = span  # enough at low, not at high
        middle = low + (high - low) // 2
        holds = enough(weights >= lax.bitcast_convert_type(middle, jnp.float32)[:, None])
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

    one = lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    n_rows = weights.shape[0]
    start = jnp.zeros(n_rows, jnp.int32), jnp.full(n_rows, one + 1, jnp.int32)
    low, _ = lax.fori_loop(0, 31, halve, start)
    return lax.bitcast_convert_type(low, jnp.float32)
