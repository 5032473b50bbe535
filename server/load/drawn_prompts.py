"""Prompts of random tokens: drawn as a whole, or block by block so that equal hashes give equal tokens."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from server.load.trace import random_prompt


class Draw(NamedTuple):
    """The source of random prompts; everything follows from the seed. `most` requests are wanted."""

    rng: np.random.Generator
    seed: int
    vocab_size: int
    most: int | None = None

    def prompt(self, n_input: int) -> tuple[int, ...]:
        return random_prompt(self.rng, n_input, self.vocab_size)


class Blocks:
    """Prompt tokens by the hash of a block of `size` tokens: the same for the same seed, scope and hash."""

    def __init__(self, draw: Draw, size: int, *scope: int) -> None:
        self._draw = draw
        self._size = size
        self._scope = scope
        self._known = dict[int, tuple[int, ...]]()

    def __getitem__(self, hash_id: int) -> tuple[int, ...]:
        if hash_id not in self._known:
            rng = np.random.default_rng([self._draw.seed, *self._scope, hash_id])
            self._known[hash_id] = random_prompt(rng, self._size, self._draw.vocab_size)
        return self._known[hash_id]

    def prompt(self, hashes: Iterable[int], n_input: int) -> tuple[int, ...]:
        """A prompt of these blocks; what they lack of `n_input` tokens is drawn, and shared with no other."""
        ids = tuple(token for one in hashes for token in self[one])[:n_input]
        return ids + self._draw.prompt(n_input - len(ids)) if len(ids) < n_input else ids
