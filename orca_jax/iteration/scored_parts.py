"""The parts of an iteration's prompts that get log-probabilities, each laid out as a batch of one row."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.iteration.flat_batch import FlatBatch, FlatLayout, SamplerArrays, TokenPrograms
from orca_jax.iteration.message import ControlMessage

SCORED = 128  # tokens of a prompt that are scored at a time


class ScoredPart(NamedTuple):
    """Up to SCORED tokens of one row, whose keys and values are in the cache.

    `flat` has them as the row's input, and as their token_ids those after them, which are scored.
    """

    place: int  # of the row in the batch
    at: npt.NDArray[np.int32]  # [SCORED] where the tokens are in the batch; 0 after the last
    flat: FlatBatch


def scored_layout(max_blocks: int) -> FlatLayout:
    """The layout of every part."""
    return FlatLayout(SCORED, 1, max_blocks)


def scored_parts(message: ControlMessage, max_blocks: int) -> Iterator[ScoredPart]:
    """Row by row, each row's in order; none of a prompt of one token."""
    ends, n_scored = np.cumsum(message.input_length), message.n_scored
    for i in np.flatnonzero(n_scored):
        first, n = ends[i] - message.input_length[i], n_scored[i]
        at = np.arange(first, first + n, dtype=np.int32)
        positions = message.kv_length[i] - ends[i] + at
        # Of a piece that ends inside the prompt the last token scores the first one of the next piece.
        targets = np.append(message.token_ids[first + 1 : ends[i]], message.next_token[i])
        for begin in range(0, n, SCORED):
            part = slice(begin, min(begin + SCORED, n))
            flat = _row(scored_layout(max_blocks), message.block_table[i], positions[part], targets[part])
            SamplerArrays(*flat.arrays.sampler).n_top[0] = message.sampling["prompt_logprobs"][i]
            padded = np.zeros(SCORED, np.int32)
            padded[: flat.n_tokens] = at[part]
            yield ScoredPart(int(i), padded, flat)


def _row(
    layout: FlatLayout,
    block_table: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    targets: npt.NDArray[np.int32],
) -> FlatBatch:
    """One row's tokens at `positions`, and those after them."""
    n = len(positions)
    buffer = np.zeros(layout.size, np.int32)
    arrays = layout.split(buffer)
    arrays.token_ids[:n] = targets
    arrays.positions[:n] = positions
    arrays.row_start[1] = n
    arrays.kv_length[0] = positions[-1] + 1
    arrays.block_table[0, : len(block_table)] = block_table
    return FlatBatch(layout, buffer, arrays, n, 1, TokenPrograms())
