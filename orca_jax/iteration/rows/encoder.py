"""Rows that run the encoder: those whose input begins with the request's first token, also after a loss.

The host knows the whole input of an encoder. The results stay in the cache, in blocks before those of the
decoder's tokens, where cross attention reads them; nothing comes back to the host.
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
    """Split block tables [R, all] whose rows begin with `n_blocks` [R] encoder blocks, at most `most_blocks`.

    Returns the decoder's block tables, and the encoder's inputs with its block tables.
    """
    places = n_blocks[:, np.newaxis] + np.arange(table.shape[1] - most_blocks)
    ids = [token_id for request in requests if request.n_to_encode for token_id in request.encoder_ids]
    length = np.array([len(request.encoder_ids) for request in requests], np.int32)
    inputs = EncoderInputs(length, np.array(ids, np.int32), table[:, :most_blocks])
    return np.take_along_axis(table, places, axis=1), inputs


def lay_out_encoder(message: ControlMessage, sizes: BatchSizes) -> FlatBatch | None:
    """Lay out the encoder's part of an iteration like `flat_batch`, without a sampler's inputs.

    Tokens have the slots where the encoder's results stay, and the block table names their blocks. Returns
    None if no row runs the encoder.
    """
    shape, encoder = sizes.shape, message.encoder
    if encoder is None or not len(encoder.token_ids):
        return None
    rows, token_ids = message.encodes, encoder.token_ids
    length, table = encoder.length[rows], encoder.block_table[rows]
    n_rows, n_tokens = len(length), len(token_ids)
    bucket = bucket_for(n_tokens, shape.encoder_buckets)
    layout = FlatLayout(bucket, min(bucket, shape.max_rows), table.shape[1], adapters=sizes.adapted(message))
    assert n_rows <= layout.n_rows, f"{n_rows} rows, {n_tokens} tokens"
    buffer, arrays = padding(layout, n_tokens, 0, n_slots=shape.n_slots, n_rows=shape.n_rows)
    np.cumsum(length, out=arrays.row_start[1 : n_rows + 1])
    arrays.row_start[n_rows + 1 :] = n_tokens
    arrays.kv_length[:n_rows] = length
    arrays.block_table[:n_rows] = table
    owner = np.repeat(np.arange(n_rows, dtype=np.intp), length)
    positions = np.arange(n_tokens, dtype=np.int32) - arrays.row_start[owner]
    if message.adapter is not None:
        arrays.adapter_of_token[:n_tokens] = message.adapter[rows].take(owner)
    arrays.token_ids[:n_tokens] = token_ids
    arrays.positions[:n_tokens] = positions
    block, offset = np.divmod(positions, shape.block_size)
    arrays.slot_of_token[:n_tokens] = table[owner, block] * shape.block_size + offset
    return FlatBatch(layout, buffer, arrays, n_tokens, n_rows, TokenPrograms())
