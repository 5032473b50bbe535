"""The prompt tokens that an iteration scores, and the batches in which it scores them."""

import numpy as np

from orca_jax.iteration.flat_batch import SamplerArrays
from orca_jax.iteration.message import BIAS, SAMPLED, ControlMessage, neutral_sampling
from orca_jax.iteration.rows.scored import SCORED, scored_parts


def test_parts_of_two_rows_among_rows_that_ask_for_nothing():
    """A decode, tokens 10 to 12 of a prompt of 20, a whole prompt of 140, and one of 1."""
    lengths = np.array([1, 3, 140, 1], np.int32)
    sampling = neutral_sampling(4)
    sampling["prompt_logprobs"][1:] = [0, 5, 2]
    message = ControlMessage(
        row=np.arange(4, dtype=np.int32),
        initiation=np.array([False, True, True, True]),
        token_index=np.zeros(4, np.int32),
        input_length=lengths,
        kv_length=np.array([9, 13, 140, 1], np.int32),
        n_prompt=np.array([0, 20, 140, 1], np.int32),
        next_token=np.array([SAMPLED, 77, SAMPLED, SAMPLED], np.int32),
        token_ids=np.arange(145, dtype=np.int32) + 1000,
        earlier_ids=np.array([], np.int32),
        token_on_device=np.array([True, False, False, False]),
        block_table=np.arange(40, dtype=np.int32).reshape(4, 10),
        sampling=sampling,
        bias=np.array([], BIAS),
    )
    piece, first, second = scored_parts(message, max_blocks=12)
    assert [part.place for part in (piece, first, second)] == [1, 2, 2]
    assert piece.at[:3].tolist() == [1, 2, 3] and not piece.at[3:].any()
    assert first.at.tolist() == [*range(4, 4 + 128)]
    assert second.at[:11].tolist() == [*range(132, 143)] and not second.at[11:].any()
    assert [SamplerArrays(*part.flat.arrays.sampler).n_top[0] for part in (piece, first, second)] == [0, 5, 5]
    # The piece's last token scores the first one of the next piece; the prompt's last scores none.
    assert piece.flat.arrays.token_ids[:4].tolist() == [1002, 1003, 77, 0]
    assert first.flat.arrays.token_ids.tolist() == [*range(1005, 1133)]
    assert second.flat.arrays.token_ids[:12].tolist() == [*range(1133, 1144), 0]
    assert piece.flat.arrays.positions[:4].tolist() == [10, 11, 12, 0]
    assert second.flat.arrays.positions[:12].tolist() == [*range(128, 139), 0]
    for part, n_tokens, kv_length in ((piece, 3, 13), (first, 128, 128), (second, 11, 139)):
        arrays = part.flat.arrays
        assert (part.flat.n_tokens, part.flat.layout.n_tokens, SCORED) == (n_tokens, 128, 128)
        assert arrays.row_start.tolist() == [0, n_tokens]
        assert arrays.kv_length.tolist() == [kv_length]
        assert arrays.block_table.tolist() == [[*message.block_table[part.place].tolist(), 0, 0]]
