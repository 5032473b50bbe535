"""Sets of tokens as bit masks: bit t % 32 of word t // 32 represents token t."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]


def n_words(vocab_size: int) -> int:
    """The number of words with a bit for each token id."""
    return -(-vocab_size // 32)


def words_of(token_ids: Iterable[int] | None, vocab_size: int) -> Words:
    """[n_words] with the bits of `token_ids`, or of the whole vocabulary if None."""
    bits = np.zeros(32 * n_words(vocab_size), np.bool_)
    if token_ids is None:
        bits[:vocab_size] = True
    else:
        bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def has(words: Words, token_id: int) -> bool:
    """Whether a mask has this token."""
    return 0 <= token_id < 32 * len(words) and bool(int(words[token_id // 32]) >> (token_id % 32) & 1)
