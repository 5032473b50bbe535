"""Scored rows: known tokens get their log-probabilities, in a given output or in a prompt.

A given output (`Given`) is not sampled: in an increment each of its tokens that the iteration computes is a
row of one known token, neighbours in the tokens' order, and the logits of each score the token after it.

A prompt is scored on request, whatever the kind of its request's rows. The forward pass gives the hidden
state of each row's last token alone, so the chunk's tokens pass through the last layer once more, in parts
that are laid out as batches of one row (`scored_parts`).
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


class Given(RowKind):
    """The kind of a request whose output is given, all of it, and scored."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.given_ids = tuple(token_ids)
        # `n_tokens_issued` does not count how many tokens an iteration in flight has.
        self.runs_ahead = len(self.given_ids) < 2

    def most_tokens(self, req: Request) -> int:
        return len(self.given_ids) - len(req.output_ids)

    def rows(self, req: Request, n_tokens: int, places: Sequence[int]) -> list[InputRow]:
        if not req.in_initiation:
            return [self._answering(req, 1, req.n_computed + i) for i in range(n_tokens)]
        return [self._answering(req, n_tokens, req.n_computed)]

    def accept(self, req: Request, answer: RowAnswer) -> Iterator[tuple[int, FinishReason | None]]:
        for record in answer.logprobs:
            req.logprobs.append(record)
            reason = req.accept(record.token_id)
            yield record.token_id, reason
            if reason is not None:
                return

    def _answering(self, req: Request, n_tokens: int, start: int) -> InputRow:
        """A row, which answers with its next token's log-probabilities if that is a token of the output."""
        row = prompt_chunk(req, n_tokens, start)
        return row._replace(answers=start + n_tokens >= len(req.prompt_ids))


def add_prompt_logprobs(req: Request, records: Sequence[TokenLogprobs]) -> None:
    """Take the log-probabilities of prompt tokens after the first: for a chunked prompt, of a chunk's."""
    req.prompt_logprobs = [*(req.prompt_logprobs or ()), *records]


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
