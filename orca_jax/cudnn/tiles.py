"""A bucket's entries for cuDNN: their number, and the words that the host makes for each iteration.

A row of one token is one entry with one query. A row of several tokens is cut into tiles of Q queries.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

QUERIES = 64  # tokens of a tile


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The entries of a bucket of `n_tokens` tokens and `n_rows` rows.

    With `one_each` row r has token r alone.
    """

    n_tokens: int
    n_rows: int
    one_each: bool = False

    @property
    def queries(self) -> int:
        """Tokens of a tile, at most the bucket's."""
        return min(QUERIES, self.n_tokens)

    @property
    def n_tiles(self) -> int:
        """The most tiles: full ones, and a partial one for each row of two or more tokens."""
        if self.one_each or self.n_tokens == 1:
            return 0
        return self.n_tokens // self.queries + min(self.n_rows, self.n_tokens // 2)

    @property
    def n_words(self) -> int:
        """The number of words from `tile_words`; 0 with `one_each`, where a token's place is its row."""
        return 0 if self.one_each else 2 * self.n_tiles + self.n_tokens

    def split(self, words: Any) -> tuple[Any, Any, Any]:
        """Split the words: each tile's row and first token [n_tiles], and each token's place [n_tokens].

        An unused tile has row `n_rows`. Places number one query for each row, then the tiles' queries;
        padding tokens have the first place after all of these.
        """
        n = self.n_tiles
        return words[:n], words[n : 2 * n], words[2 * n :]


def tile_words(row_start: npt.NDArray[np.int32], plan: TilePlan) -> npt.NDArray[np.int32]:
    """The words [n_words] for rows that begin at the tokens `row_start` [R + 1]."""
    words = np.zeros(plan.n_words, np.int32)
    if plan.one_each:
        return words
    tile_row, tile_start, place = plan.split(words)
    tile_row.fill(plan.n_rows)
    place.fill(plan.n_rows + plan.n_tiles * plan.queries)
    n_inputs = np.diff(row_start)
    n_tiles = np.where(n_inputs > 1, -(-n_inputs // plan.queries), 0)
    end = np.cumsum(n_tiles)
    row = np.repeat(np.arange(plan.n_rows), n_tiles)
    of_row = np.arange(len(row)) - (end - n_tiles)[row]
    tile_row[: len(row)] = row
    tile_start[: len(row)] = row_start[row] + plan.queries * of_row
    # A row's tiles are adjacent, and so are its tokens' places.
    first = np.where(n_inputs > 1, plan.n_rows + plan.queries * (end - n_tiles), np.arange(plan.n_rows))
    token = np.arange(row_start[-1])
    owner = np.repeat(np.arange(plan.n_rows), n_inputs)
    place[: len(token)] = first[owner] + token - row_start[owner]
    return words
