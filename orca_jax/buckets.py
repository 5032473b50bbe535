"""The total-token sizes that programs are compiled for: an iteration is padded to the next of them.

Padding stays under 8 tokens below 64, and within a quarter of the real tokens from 64 up.
"""

from bisect import bisect_left
from collections.abc import Sequence

_STEP = 8  # below 64


def bucket_sizes(max_tokens: int) -> tuple[int, ...]:
    """Ascending sizes that hold 1 to `max_tokens` tokens; the last is `max_tokens` itself.

    The first is 1: one request alone in its increment phase is the commonest iteration of a quiet server.
    """
    assert max_tokens >= 1
    sizes = [1]
    while sizes[-1] < max_tokens:
        sizes.append(min(_size_after(sizes[-1]), max_tokens))
    return tuple(sizes)


def _size_after(size: int) -> int:
    """Steps of 8 below 64; four sizes an octave above, so that powers of two, which users like, are sizes."""
    step = _STEP if size < 64 else (1 << (size.bit_length() - 1)) // 4
    return size // step * step + step


def bucket_for(n_tokens: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds `n_tokens`."""
    assert 1 <= n_tokens <= sizes[-1], f"{n_tokens} tokens, buckets up to {sizes[-1]}"
    return sizes[bisect_left(sizes, n_tokens)]
