"""The total-token sizes that programs are compiled for: an iteration is padded to the next of them.

Padding stays under 8 tokens below 64, and within a quarter of the real tokens from 64 up. Coarse sizes are
about half as many, for GPUs, where each takes long to compile: XLA tries out how to run every product of it.
There an iteration of few tokens takes as long as reading the weights, whatever its padding.
"""

from bisect import bisect_left
from collections.abc import Sequence

from orca_jax.config import ServingConfig

_STEP = 8  # below 64
_COARSE = (8, 16, 32)  # the first ones after 1


def bucket_sizes(max_tokens: int, *, coarse: bool = False) -> tuple[int, ...]:
    """Ascending sizes that hold 1 to `max_tokens` tokens; the last is `max_tokens` itself.

    The first is 1: one request alone in its decode phase is the commonest iteration of a quiet server.
    `coarse`: then 8, 16, 32, and from there powers of two, and one and a half times them. These are 16 sizes
    up to 2,048; above 32 tokens the padding is 18 % of the real ones on average, and half of them at most.
    """
    assert max_tokens >= 1
    size_after = _coarse_size_after if coarse else _size_after
    sizes = [1]
    while sizes[-1] < max_tokens:
        sizes.append(min(size_after(sizes[-1]), max_tokens))
    return tuple(sizes)


def engine_buckets(
    max_tokens: int, max_rows: int, *, deterministic: bool = False, coarse: bool = False
) -> tuple[int, ...]:
    """The sizes of an engine whose iterations have up to `max_tokens` tokens and `max_rows` requests.

    A `deterministic` engine has one for each phase: decodes, then prefills.
    """
    if deterministic:
        return tuple(sorted({max_rows, max_tokens}))
    return bucket_sizes(max_tokens, coarse=coarse)


def serving_buckets(serving: ServingConfig) -> tuple[int, ...]:
    """The sizes of an engine that serves so."""
    return engine_buckets(
        serving.max_batch_tokens,
        serving.max_batch_size,
        deterministic=serving.deterministic,
        coarse=serving.coarse_buckets,
    )


def _coarse_size_after(size: int) -> int:
    for first in _COARSE:
        if size < first:
            return first
    half = 1 << (size.bit_length() - 2)  # of the power of two at or below
    return size // half * half + half


def _size_after(size: int) -> int:
    """Steps of 8 below 64; four sizes an octave above, so that powers of two, which users like, are sizes."""
    step = _STEP if size < 64 else (1 << (size.bit_length() - 1)) // 4
    return size // step * step + step


def bucket_for(n_tokens: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds `n_tokens`."""
    assert 1 <= n_tokens <= sizes[-1], f"{n_tokens} tokens, buckets up to {sizes[-1]}"
    return sizes[bisect_left(sizes, n_tokens)]
