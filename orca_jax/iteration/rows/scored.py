"""Scored rows: the known tokens of an output or a prompt get their log-probabilities.

A scored output (`ScoredOutput`) comes with the request and is not sampled. In an increment each of its tokens
is a separate row of one token, and the logits of each row score the token after it.

The tokens of any request's prompt can be scored. A forward pass computes the last layer only for each row's
last token, so the chunk's tokens pass through the last layer once more, in parts that are laid out as batches
of one row (`scored_parts`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.iteration.flat_batch import FlatBatch, FlatLayout, SamplerArrays, TokenPrograms
from orca_jax.iteration.message import ControlMessage
from orca_jax.request.request import FinishReason, InputRow, Request, RowAnswer, RowKind, prompt_chunk
from orca_jax.request.sampled import TokenLogprobs

SCORED = 128  # tokens of a prompt that are scored at a time


class ScoredOutput(RowKind):
    """The row kind of a request whose output is known and only scored."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.scored_ids = tuple(token_ids)

    def runs_ahead(self, req: Request) -> bool:
        # `n_tokens_issued` assumes that an iteration in flight has one token.
        return len(self.scored_ids) < 2

    @classmethod
    def most_tokens(cls, requests: Sequence[Request]) -> list[int]:
        return [len(req.kind.scored_ids) - len(req.output_ids) for req in requests]

    def rows(self, req: Request, n_tokens: int, places: Sequence[int]) -> list[InputRow]:
        if not req.in_initiation:
            return [self._answering(req, 1, req.n_computed + i) for i in range(n_tokens)]
        return [self._answering(req, n_tokens, req.n_computed)]

    def accept(self, req: Request, answer: RowAnswer) -> tuple[Sequence[int], FinishReason | None]:
        _, logprobs = answer
        token_ids, reason = req.accept_all([record.token_id for record in logprobs])
        req.logprobs += logprobs[: len(token_ids)]
        return token_ids, reason

    def _answering(self, req: Request, n_tokens: int, start: int) -> InputRow:
        """A row that returns its next token's log-probabilities if that token belongs to the output."""
        row = prompt_chunk(req, n_tokens, start)
        return row._replace(answers=start + n_tokens >= len(req.prompt_ids))


def add_prompt_logprobs(req: Request, records: Sequence[TokenLogprobs]) -> None:
    """Append the log-probabilities of prompt tokens after the first; a chunked prompt gets them by chunk."""
    req.prompt_logprobs = [*(req.prompt_logprobs or ()), *records]


class ScoredPart(NamedTuple):
    """Up to SCORED tokens of one row, whose keys and values are in the cache.

    `flat` has their positions, and in `token_ids` the tokens after them, which are scored.
    """

    place: int  # the row's index in the batch
    at: npt.NDArray[np.int32]  # [SCORED] the tokens' indices in the batch; 0 after the last
    flat: FlatBatch


def scored_layout(max_blocks: int, *, adapters: bool = False) -> FlatLayout:
    """The layout of every part."""
    return FlatLayout(SCORED, 1, max_blocks, adapters=adapters)


def scored_parts(message: ControlMessage, max_blocks: int) -> Iterator[ScoredPart]:
    """The parts, row by row and in order. A prompt of one token has none."""
    ends, n_scored = np.cumsum(message.input_length), message.n_scored
    layout = scored_layout(max_blocks, adapters=message.adapter is not None)
    for i in np.flatnonzero(n_scored):
        first, n = ends[i] - message.input_length[i], n_scored[i]
        at = np.arange(first, first + n, dtype=np.int32)
        positions = message.kv_length[i] - ends[i] + at
        # The last token of a chunk scores the first token of the next chunk.
        targets = np.append(message.token_ids[first + 1 : ends[i]], message.next_token[i])
        for begin in range(0, n, SCORED):
            part = slice(begin, min(begin + SCORED, n))
            flat = _row(layout, message.block_table[i], positions[part], targets[part])
            if message.adapter is not None:
                flat.arrays.adapter_of_token[: flat.n_tokens] = message.adapter[i]
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
    """Lay out one row's tokens at `positions`, which score `targets`."""
    n = len(positions)
    buffer = np.zeros(layout.size, np.int32)
    arrays = layout.split(buffer)
    arrays.token_ids[:n] = targets
    arrays.positions[:n] = positions
    arrays.row_start[1] = n
    arrays.kv_length[0] = positions[-1] + 1
    arrays.block_table[0, : len(block_table)] = block_table
    return FlatBatch(layout, buffer, arrays, n, 1, TokenPrograms())
