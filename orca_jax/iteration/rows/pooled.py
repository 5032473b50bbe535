"""Pooled rows: embeddings are sums of the final hidden states of a prompt's last token, its first, or all.

A forward pass computes the last layer only for each row's last token, and its result stays on the device. So
the tokens to pool pass through the last layer once more, as scored tokens do (scored.py); their keys and
values are in the cache. A part has tokens of many rows, so that many short prompts start few programs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.iteration.flat_batch import FlatBatch, FlatLayout, TokenPrograms
from orca_jax.iteration.message import POOLS_ALL, POOLS_FIRST, POOLS_LAST, ControlMessage
from orca_jax.iteration.rows.scored import SCORED
from orca_jax.iteration.shape import EngineShape
from orca_jax.request.pooled_vector import Vector
from orca_jax.request.request import Request

# A row's flag, by its request's pooling.
FLAG_OF = {None: 0, "last": POOLS_LAST, "mean": POOLS_ALL, "cls": POOLS_FIRST}


def add_pooled(req: Request, part: Vector) -> None:
    """Add an iteration's sum of hidden states; a chunked prompt gets one sum per chunk."""
    req.pooled = part if req.pooled is None else req.pooled + part


class PooledPart(NamedTuple):
    """Up to SCORED tokens of some rows; `flat` is a batch of only these tokens."""

    places: list[int]  # the rows' indices in the iteration's batch
    at: npt.NDArray[np.int32]  # [SCORED] the tokens' indices in that batch; 0 after the last
    flat: FlatBatch


def pooled_layout(shape: EngineShape, *, adapters: bool = False) -> FlatLayout:
    """The layout of every part."""
    return FlatLayout(SCORED, min(SCORED, shape.max_rows), shape.max_blocks, adapters=adapters)


def pooled_parts(
    message: ControlMessage, n_pooled: npt.NDArray[np.int32], shape: EngineShape, *, causal: bool = True
) -> Iterator[PooledPart]:
    """Split `n_pooled` [R] input tokens of each row (`ControlMessage.n_pooled`) into parts, in order.

    Unless attention is `causal`, each token sees the keys of its whole row.

    In a deterministic engine each row begins a part, so that the order of summation depends on nothing else.
    """
    layout = pooled_layout(shape, adapters=message.adapter is not None)
    pieces, n_tokens = list[_Piece](), 0
    for piece in _pieces(message, n_pooled.tolist(), shape):
        if n_tokens + piece.n > SCORED or len(pieces) == layout.n_rows or (pieces and shape.deterministic):
            yield _part(message, layout, pieces, causal=causal)
            pieces, n_tokens = [], 0
        pieces.append(piece)
        n_tokens += piece.n
    if pieces:
        yield _part(message, layout, pieces, causal=causal)


class _Piece(NamedTuple):
    """`n` consecutive tokens of a row, from index `first` in the batch."""

    row: int
    first: int
    n: int


def _pieces(message: ControlMessage, n_pooled: list[int], shape: EngineShape) -> Iterator[_Piece]:
    """Cut the rows' tokens into pieces that fill up the parts in order."""
    ends = np.cumsum(message.input_length)
    ends = np.where(
        message.sampling["flags"] & POOLS_FIRST, ends - message.input_length + n_pooled, ends
    ).tolist()
    left = SCORED
    for row in np.flatnonzero(n_pooled).tolist():
        first, end = ends[row] - n_pooled[row], ends[row]
        if shape.deterministic:
            left = SCORED
        while first < end:
            n = min(left, end - first)
            yield _Piece(row, first, n)
            first += n
            left = left - n or SCORED


def _part(message: ControlMessage, layout: FlatLayout, pieces: list[_Piece], *, causal: bool) -> PooledPart:
    buffer = np.zeros(layout.size, np.int32)
    arrays = layout.split(buffer)
    rows = np.array([piece.row for piece in pieces])
    n_tokens = np.array([piece.n for piece in pieces])
    at = np.concatenate([np.arange(piece.first, piece.first + piece.n) for piece in pieces])
    # In each row, index + shift is position.
    shift = message.kv_length[rows] - np.cumsum(message.input_length)[rows]
    total = len(at)
    arrays.positions[:total] = at + np.repeat(shift, n_tokens)
    if message.adapter is not None:
        arrays.adapter_of_token[:total] = np.repeat(message.adapter[rows], n_tokens)
    np.cumsum(n_tokens, out=arrays.row_start[1 : len(rows) + 1])
    arrays.row_start[len(rows) + 1 :] = total
    seen = arrays.positions[arrays.row_start[1 : len(rows) + 1] - 1] + 1
    arrays.kv_length[: len(rows)] = seen if causal else message.kv_length[rows]
    arrays.block_table[: len(rows), : message.block_table.shape[1]] = message.block_table[rows]
    padded = np.zeros(SCORED, np.int32)
    padded[:total] = at
    return PooledPart(
        rows.tolist(), padded, FlatBatch(layout, buffer, arrays, total, len(rows), TokenPrograms())
    )
