"""Rows that run the encoder: those whose input begins with their request's first token, as after a loss too.

The host knows all of an encoder's input. Its results stay in the cache, in blocks before those of the
decoder's tokens, where cross attention reads them; nothing comes back.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orca_jax.iteration.flat_batch import BatchSizes, FlatBatch, FlatLayout, TokenPrograms, padding
from orca_jax.iteration.message import ControlMessage, EncoderInputs
from orca_jax.iteration.shape import bucket_for
from orca_jax.request.request import Request


def encoder_inputs(
    requests: Sequence[Request],
    table: npt.NDArray[np.int32],
    n_blocks: npt.NDArray[np.int32],
    most_blocks: int,
) -> tuple[npt.NDArray[np.int32], EncoderInputs]:
    """Split block tables [R, all] that begin with `n_blocks` [R] of an encoder, at most `most_blocks`.

    Returns the decoder's part, and the encoder's with its inputs.
    """
    places = n_blocks[:, np.newaxis] + np.arange(table.shape[1] - most_blocks)
    ids = [token_id for request in requests if request.n_to_encode for token_id in request.encoder_ids]
    length = np.array([len(request.encoder_ids) for request in requests], np.int32)
    own = EncoderInputs(length, np.array(ids, np.int32), table[:, :most_blocks])
    return np.take_along_axis(table, places, axis=1), own


def lay_out_encoder(message: ControlMessage, sizes: BatchSizes) -> FlatBatch | None:
    """Lay out the encoder's part of an iteration; None if no row runs the encoder."""
    shape, encoder = sizes.shape, message.encoder
    if encoder is None or not len(encoder.token_ids):
        return None
    return encoder_batch(
        message,
        bucket=bucket_for(len(encoder.token_ids), shape.encoder_buckets),
        max_bs=shape.max_rows,
        block_size=shape.block_size,
        n_slots=shape.n_slots,
        n_rows=shape.n_rows,
    )


def encoder_batch(
    message: ControlMessage, *, bucket: int, max_bs: int, block_size: int, n_slots: int, n_rows: int
) -> FlatBatch:
    """Lay out the encoder's input of the rows that run it: as `flat_batch`, without a sampler's work.

    Its slots are those where the encoder's results stay, and its block table names their blocks.
    """
    assert message.encoder is not None
    rows, token_ids = message.encodes, message.encoder.token_ids
    length, table = message.encoder.length[rows], message.encoder.block_table[rows]
    n_rows_here, n_tokens = len(length), len(token_ids)
    layout = FlatLayout(bucket, min(bucket, max_bs), table.shape[1])
    assert n_rows_here <= layout.n_rows and n_tokens <= bucket, f"{n_rows_here} rows, {n_tokens} tokens"
    buffer, arrays = padding(layout, n_tokens, 0, n_slots=n_slots, n_rows=n_rows)
    np.cumsum(length, out=arrays.row_start[1 : n_rows_here + 1])
    arrays.row_start[n_rows_here + 1 :] = n_tokens
    arrays.kv_length[:n_rows_here] = length
    arrays.block_table[:n_rows_here] = table
    owner = np.repeat(np.arange(n_rows_here, dtype=np.intp), length)
    positions = np.arange(n_tokens, dtype=np.int32) - arrays.row_start[owner]
    arrays.token_ids[:n_tokens] = token_ids
    arrays.positions[:n_tokens] = positions
    arrays.slot_of_token[:n_tokens] = (
        table[owner, positions // block_size] * block_size + positions % block_size
    )
    return FlatBatch(layout, buffer, arrays, n_tokens, n_rows_here, TokenPrograms())
