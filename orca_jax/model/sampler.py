"""Sampling: chooses each row's next token, in programs separate from the forward pass.

The order is `adjust` (biases, penalties), `allow` (token masks), then `greedy`, or `sample` with or without
top-k and top-p. A row's draw depends only on the row's logits, seed and token index, so a request's tokens do
not depend on its neighbours. `logprobs` are computed from the model's logits, before any adjustment.

Whatever a row's logits are, even NaN and infinities when weights overflow, its token is in the vocabulary and
no other row is affected. `adjust` and `allow` make logits finite; checking each logit again in the choice
would cost more than the choice.

The vocabulary is never sorted: top-k and top-p search for their threshold.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

IN_PROMPT = 1 << 30  # added in `seen` if the prompt has the token
# Logits are clipped to this before an adjustment. Penalties multiply them by at most a hundred, and the
# difference of two such values is still a finite float32.
_MOST = 1e36
_GROUP = 256  # logits of a group, in the first step of a draw or of a search for the largest
_BITS = 30  # of a float32 in [0, 1], whose sign and highest bit of the exponent are 0
_ONE = 0x3F800000  # 1.0
_SUMMED = 1024  # weights of a group, in the first step of a search's sums on an accelerator
_DIGIT = (
    3  # bits that a pass of a search finds on an accelerator; with more, comparing costs more than reading
)


def adjust(
    logits: jax.Array,
    seen: jax.Array,
    bias: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """Apply biases and penalties: logits, bias [R, V] float32, seen [R, V] int32, the rest [R]; gives [R, V].

    `seen` counts a token's occurrences in the output, plus IN_PROMPT if the prompt has it. First the bias is
    added. Then tokens in prompt or output become less likely by the factor `repetition` (Keskar et al. 2019,
    as in Hugging Face: a positive logit is divided, a negative one multiplied). Last, as in OpenAI's API,
    `frequency` is subtracted for each occurrence in the output, and `presence` once. The result is finite if
    the parameters are within the bounds of SamplingParams.
    """
    count = seen & (IN_PROMPT - 1)
    biased = _finite(logits) + bias
    factor = jnp.where(seen > 0, repetition[:, None], 1.0)
    repeated = jnp.where(biased > 0, biased / factor, biased * factor)
    return repeated - frequency[:, None] * count - presence[:, None] * (count > 0)


def allow(logits: jax.Array, words: jax.Array) -> jax.Array:
    """Set token t to -inf if bit t % 32 of word t // 32 is 0: logits [R, V], words [R, V / 32] int32."""
    bits = (words[:, :, None] >> jnp.arange(32)) & 1
    return jnp.where(bits.reshape(len(words), -1)[:, : logits.shape[1]] == 1, _finite(logits), -jnp.inf)


def greedy(logits: jax.Array) -> jax.Array:
    """[R, V] float32 to [R] int32: the first of the largest logits."""
    return lax.platform_dependent(logits, cpu=_greedy_by_groups, default=_greedy_at_once)


def _greedy_at_once(logits: jax.Array) -> jax.Array:
    # Two plain reductions: argmax, which carries value and index, does not vectorize.
    top = logits.max(axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(logits == top, index, logits.shape[-1] - 1).min(axis=-1)


def _greedy_by_groups(logits: jax.Array) -> jax.Array:
    """Find the first group with the largest maximum, then the index within it.

    On a CPU, writing an array as large as the logits would take longer than everything else.
    """
    vocab = logits.shape[-1]
    last_group = ((0, 0), (0, -vocab % _GROUP))
    tops = lax.reduce_window(logits, -jnp.inf, lax.max, (1, _GROUP), (1, _GROUP), last_group)
    start = _greedy_at_once(tops)[:, None] * _GROUP
    members = jnp.minimum(start + jnp.arange(_GROUP, dtype=jnp.int32), vocab - 1)
    index = _greedy_at_once(jnp.take_along_axis(logits, members, axis=-1))
    return jnp.minimum(start[:, 0] + index, vocab - 1)


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed_low: jax.Array,
    seed_high: jax.Array,
    token_index: jax.Array,
    *,
    cut: bool,
) -> jax.Array:
    """Draw a token for each row: logits [R, V] float32, the rest [R]; returns [R] int32.

    Temperature is applied first, then `keep`. Rows of temperature 0 are greedy. `cut` False leaves top_k and
    top_p out of the program.
    """
    hot = jnp.where(temperature > 0, temperature, 1.0)
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / hot[:, None]
    weights = jnp.exp(scaled)
    weights = keep(weights, top_k, top_p, min_p) if cut else _keep_min_p(weights, min_p)
    drawn = _draw(weights, uniform(seed_low, seed_high, token_index))
    return jnp.where(temperature > 0, drawn, greedy(logits))


def uniform(seed_low: jax.Array, seed_high: jax.Array, token_index: jax.Array) -> jax.Array:
    """A random number in [0, 1) for each row, from its seed and token index; all [R]."""

    def of_row(seed_low: jax.Array, seed_high: jax.Array, token_index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed_low), seed_high)
        return jax.random.uniform(jax.random.fold_in(key, token_index))

    return jax.vmap(of_row)(seed_low, seed_high, token_index)


def keep(weights: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Set the weights of excluded tokens to 0: weights [R, V] in [0, 1], the largest 1; the rest [R].

    First top_k, then top_p of the remaining tokens, then min_p, which excludes weights below it.
    """
    return _keep_min_p(_keep_top_p(_keep_top_k(weights, top_k), top_p), min_p)


def logprobs(
    logits: jax.Array, tokens: jax.Array, n_top: int, asked: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of each row's token [R], and ids and log-probabilities of the most likely [R, n_top].

    logits [R, V] float32, tokens [R] int32. If V is below `n_top`, the rest is id 0 with -inf. No result is
    NaN. If `asked`, bool of any shape, is false everywhere, a CPU skips the search for the most likely and
    returns id 0 with -inf; the tokens' log-probabilities are the same to the bit.
    """
    # The largest is subtracted first: next to large logits a small logarithm would lose its digits.
    largest = logits.max(axis=-1, keepdims=True)
    total = jnp.log(jnp.exp(logits - largest).sum(axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)

    def search(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _largest(logits, n_top)

    def skip(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = len(logits), n_top
        return jnp.full(shape, -jnp.inf, logits.dtype), jnp.zeros(shape, jnp.int32)

    def search_if_asked(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.cond(asked.any(), search, skip, logits)

    # As in _largest_bound, an accelerator searches unconditionally.
    top, ids = lax.platform_dependent(logits, cpu=search_if_asked, default=search)
    # If a logit is infinite, or all are NaN, no token has a probability.
    return _nan_last((chosen - largest - total)[:, 0]), ids, _nan_last(top - largest - total)


def _finite(logits: jax.Array) -> jax.Array:
    """Clip to +-_MOST, and turn NaN into -_MOST."""
    return jnp.clip(jnp.where(jnp.isnan(logits), -_MOST, logits), -_MOST, _MOST)


def _nan_last(values: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(values), -jnp.inf, values)


def _largest(logits: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The n largest [R, n], descending, and their indices.

    They are in the n groups with the largest maxima, so only these groups are searched.
    """
    n_rows, vocab = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % _GROUP)), constant_values=-jnp.inf)
    grouped = padded.reshape(n_rows, -1, _GROUP)
    n_groups = min(n, grouped.shape[1])
    _, groups = lax.top_k(grouped.max(axis=-1), n_groups)
    groups = jnp.sort(groups, axis=-1)  # so that equal logits stay in order
    members = jnp.take_along_axis(grouped, groups[:, :, None], axis=1).reshape(n_rows, -1)
    top, place = lax.top_k(members, n)
    ids = jnp.take_along_axis(groups, place // _GROUP, axis=-1) * _GROUP + place % _GROUP
    return top, jnp.where(ids < vocab, ids, 0)


def _draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index at which the running sum of weights [R, V] passes the fraction uniform [R] of the total.

    It is searched in the sums of groups, then inside one group, to avoid a running sum over V terms.
    """
    n_rows, vocab = weights.shape
    grouped = jnp.pad(weights, ((0, 0), (0, -vocab % _GROUP))).reshape(n_rows, -1, _GROUP)
    sums = grouped.sum(axis=-1)
    before_group = jnp.cumsum(sums, axis=-1)
    group, rest = _pass(before_group, sums, uniform * before_group[:, -1])
    inside = jnp.take_along_axis(grouped, group[:, None, None], axis=1)[:, 0]
    member, _ = _pass(jnp.cumsum(inside, axis=-1), inside, rest)
    return jnp.minimum(group * _GROUP + member, weights.shape[-1] - 1).astype(jnp.int32)


def _pass(running: jax.Array, terms: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first index [R] with a running sum above target and a positive term, and the target's remainder."""
    fits = (running > target[:, None]) & (terms > 0)
    # If rounding puts the target at or above the last sum, the last positive term is taken.
    last = terms.shape[-1] - 1 - jnp.argmax(terms[:, ::-1] > 0, axis=-1)
    index = jnp.where(fits.any(axis=-1), jnp.argmax(fits, axis=-1), last)
    here = jnp.take_along_axis(running - terms, index[:, None], axis=-1)[:, 0]
    return index, jnp.maximum(target - here, 0.0)


def _keep_top_k(weights: jax.Array, top_k: jax.Array) -> jax.Array:
    """Zero all but the k largest weights, keeping ties; k = 0 keeps all."""
    wanted = jnp.where(top_k > 0, top_k, weights.shape[-1])
    bound = _largest_bound(weights, jnp.ones((), jnp.int32), wanted, top_k > 0)
    return jnp.where((weights >= bound[:, None]) | (top_k == 0)[:, None], weights, 0.0)


def _keep_top_p(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """Zero all but the fewest largest weights whose share is at least p, keeping ties; p = 1 keeps all."""
    wanted = top_p * weights.sum(axis=-1)
    bound = _largest_bound(weights, weights, wanted, top_p < 1)
    return jnp.where((weights >= bound[:, None]) | (top_p >= 1)[:, None], weights, 0.0)


def _keep_min_p(weights: jax.Array, min_p: jax.Array) -> jax.Array:
    """Zero the weights below min_p; the largest weight is 1."""
    return jnp.where(weights >= min_p[:, None], weights, 0.0)


def _largest_bound(weights: jax.Array, amounts: jax.Array, wanted: jax.Array, asked: jax.Array) -> jax.Array:
    """The largest bound [R] at which weights >= bound have `amounts` of at least `wanted`; weights in [0, 1].

    `amounts` are [R, V] or one number for all. A search over the bits of a float32, which order like its
    values, without a sort. A CPU finds one bit with each pass over the weights, and skips the search if no
    row `asked` [R] for it; on an accelerator that would involve the host. There, where reading the weights
    costs the most, a pass finds _DIGIT bits.
    """

    def search_if_asked(low: jax.Array) -> jax.Array:
        def at_bounds(bounds: list[jax.Array]) -> list[jax.Array]:
            return [jnp.where(weights >= bound, amounts, 0).sum(axis=-1) for bound in bounds]

        search = partial(_search, at_bounds, wanted, digit=1)
        return lax.cond(asked.any(), search, lambda low: low, low)

    def search(low: jax.Array) -> jax.Array:
        # Sums of groups first, for all bounds in one kernel, and then the sums of these in another.
        grouped, grouped_amounts = _by_groups(weights), amounts if amounts.ndim == 0 else _by_groups(amounts)

        def at_bounds(bounds: list[jax.Array]) -> list[jax.Array]:
            kept = [jnp.where(grouped >= bound[..., None], grouped_amounts, 0) for bound in bounds]
            sums = jnp.stack([each.sum(axis=-1) for each in kept])
            return [*lax.optimization_barrier(sums).sum(axis=-1)]

        return _search(at_bounds, wanted, low, digit=_DIGIT)

    low = jnp.zeros(weights.shape[0], jnp.int32)
    low = lax.platform_dependent(low, cpu=search_if_asked, default=search)
    return lax.bitcast_convert_type(low, jnp.float32)


def _search(
    at_bounds: Callable[[list[jax.Array]], list[jax.Array]], wanted: jax.Array, low: jax.Array, *, digit: int
) -> jax.Array:
    """The bits [R] int32 of the largest bound at which there is enough; `low`, zeros, are enough always.

    `at_bounds` measures at several bounds [R, 1]: 2 ** digit - 1 in each pass, ascending.
    """
    assert _BITS % digit == 0
    n_passes = _BITS // digit

    def add_digit(i: jax.Array, low: jax.Array) -> jax.Array:
        step = jnp.left_shift(1, digit * (n_passes - 1 - i))
        bits = [low + n * step for n in range(1, 1 << digit)]
        amounts = at_bounds([lax.bitcast_convert_type(each, jnp.float32)[:, None] for each in bits])
        # Enough at a bound is enough at every lower one, but for the rounding of sums.
        found = low
        for each, amount in zip(bits, amounts, strict=True):
            found = jnp.where((each <= _ONE) & (amount >= wanted), each, found)
        return found

    return lax.fori_loop(0, n_passes, add_digit, low)


def _by_groups(weights: jax.Array) -> jax.Array:
    """Weights [R, V], filled up with zeros, in groups: [R, n, _SUMMED]."""
    padded = jnp.pad(weights, ((0, 0), (0, -weights.shape[-1] % _SUMMED)))
    return padded.reshape(len(weights), -1, _SUMMED)
