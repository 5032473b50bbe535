"""The encoder's part of an iteration, worked by hand: two of three requests run it."""

from dataclasses import replace

import numpy as np
import pytest

from orca_jax.control.message_wire import decode_message, encode_message
from orca_jax.errors import BadFrame
from orca_jax.iteration.flat_batch import FlatLayout, batch_sizes
from orca_jax.iteration.message import BIAS, SAMPLED, ControlMessage, EncoderInputs, neutral_sampling
from orca_jax.iteration.rows.encoder import lay_out_encoder
from orca_jax.iteration.shape import EngineShape

SHAPE = EngineShape(
    block_size=2,
    max_blocks=3,
    max_rows=4,
    max_tokens=16,
    n_rows=8,
    n_blocks=10,
    vocab_size=99,
    max_encoder_blocks=2,
)
# The second request decodes; the third, after a loss, also computes the token that it had sampled.
MESSAGE = ControlMessage(
    row=np.array([4, 0, 2], np.int32),
    initiation=np.array([True, False, True]),
    token_index=np.array([0, 2, 1], np.int32),
    input_length=np.array([1, 1, 2], np.int32),
    kv_length=np.array([1, 3, 2], np.int32),
    n_prompt=np.array([1, 0, 1], np.int32),
    next_token=np.full(3, SAMPLED, np.int32),
    token_ids=np.array([7, 0, 7, 50], np.int32),
    earlier_ids=np.array([], np.int32),
    token_on_device=np.array([False, True, False]),
    block_table=np.array([[5, 0, 0], [3, 9, 0], [2, 0, 0]], np.int32),
    sampling=neutral_sampling(3),
    bias=np.array([], BIAS),
    encoder=EncoderInputs(
        length=np.array([3, 2, 4], np.int32),
        token_ids=np.array([11, 12, 13, 31, 32, 33, 34], np.int32),
        block_table=np.array([[8, 1], [4, 0], [6, 7]], np.int32),
    ),
)


def test_the_encoder_s_batch() -> None:
    flat = lay_out_encoder(MESSAGE, batch_sizes(SHAPE))
    assert flat is not None and (flat.n_tokens, flat.n_rows) == (7, 2)
    assert flat.layout == FlatLayout(8, 4, 2)
    a = flat.arrays
    assert a.token_ids.tolist() == [11, 12, 13, 31, 32, 33, 34, 0]
    assert a.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    # Blocks 8 and 1, then 6 and 7; 20 is no slot.
    assert a.slot_of_token.tolist() == [16, 17, 2, 12, 13, 14, 15, 20]
    assert a.row_start.tolist() == [0, 3, 7, 7, 7]
    assert a.kv_length.tolist() == [3, 4, 0, 0]
    assert a.block_table.tolist() == [[8, 1], [6, 7], [0, 0], [0, 0]]


def test_the_encoder_s_tokens_have_their_row_s_adapter() -> None:
    sizes = batch_sizes(replace(SHAPE, max_adapters=2, adapter_rank=16))
    plain, adapted = (
        lay_out_encoder(replace(MESSAGE, adapter=adapter), sizes)
        for adapter in (None, np.array([2, 0, 1], np.int32))
    )
    assert plain is not None and plain.layout == FlatLayout(8, 4, 2)
    assert adapted is not None and adapted.layout == FlatLayout(8, 4, 2, adapters=True)
    assert adapted.arrays.adapter_of_token.tolist() == [2, 2, 2, 1, 1, 1, 1, 0]
    assert {plain.layout, adapted.layout} <= set(sizes.encoder_layouts)


def test_the_decoder_s_batch_names_the_encoder_s_blocks_of_every_row() -> None:
    a = batch_sizes(SHAPE).lay_out(MESSAGE).arrays
    assert a.token_ids[:4].tolist() == [7, 0, 7, 50]
    assert a.positions[:4].tolist() == [0, 2, 0, 1]
    assert a.slot_of_token[:4].tolist() == [10, 18, 4, 5]
    assert a.encoder_length.tolist() == [3, 2, 4, 0]
    assert a.encoder_table.tolist() == [[8, 1], [4, 0], [6, 7], [0, 0]]


def test_rows_that_only_decode_have_no_batch_for_the_encoder() -> None:
    encoder = EncoderInputs(np.array([2], np.int32), np.zeros(0, np.int32), np.array([[4, 0]], np.int32))
    one = {name: getattr(MESSAGE, name)[1:2] for name in ("row", "initiation", "token_index", "input_length")}
    rest = {name: getattr(MESSAGE, name)[1:2] for name in ("kv_length", "n_prompt", "next_token")}
    more = {name: getattr(MESSAGE, name)[1:2] for name in ("token_ids", "token_on_device", "block_table")}
    decode = replace(MESSAGE, **one, **rest, **more, sampling=neutral_sampling(1), encoder=encoder)
    assert not decode.encodes.any()
    assert lay_out_encoder(decode, batch_sizes(SHAPE)) is None


def test_it_goes_over_the_wire() -> None:
    back = decode_message(encode_message(MESSAGE, SHAPE), SHAPE)
    assert MESSAGE.encoder is not None and back.encoder is not None
    for ours, theirs in zip(back.encoder, MESSAGE.encoder, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert back.encodes.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("encoder_length", np.array([3, 2, 5], "<i4"), "encoder length 5; it must be 1 to 4"),
        ("encoder_length", np.array([3, 2, 0], "<i4"), "encoder length 0; it must be 1 to 4"),
        ("encoder_length", np.array([3, 2], "<i4"), "encoder_length has 8 bytes"),
        ("encoder_length", np.array([4, 2, 4], "<i4"), "do not match the lengths of the rows"),
        ("encoder_ids", np.array([11] * 6 + [99], "<i4"), "token id 99; it must be 0 to 98"),
        ("encoder_ids", np.zeros(17, "<i4"), "17 tokens for the encoder came; up to 16"),
        ("encoder_blocks", np.array([8, 1, 4, 6, 10], "<u2"), "block 10; it must be 0 to 9"),
        ("encoder_blocks", np.array([8, 1, 4, 6], "<u2"), "blocks has 8 bytes; its 5 elements take 10"),
    ],
)
def test_what_no_engine_master_sends_is_refused(field: str, value: np.ndarray, message: str) -> None:
    payload = encode_message(MESSAGE, SHAPE)
    setattr(payload, field, value.tobytes())
    with pytest.raises(BadFrame, match=message):
        decode_message(payload, SHAPE)


def test_a_model_without_an_encoder_refuses_its_part() -> None:
    payload = encode_message(MESSAGE, SHAPE)
    with pytest.raises(BadFrame, match="is for an encoder, and the model has none"):
        decode_message(payload, replace(SHAPE, max_encoder_blocks=0))


def test_the_encoder_s_buckets_are_coarse() -> None:
    assert replace(SHAPE, max_tokens=100).encoder_buckets == (8, 16, 32, 48, 64, 96, 100)
    assert replace(SHAPE, max_tokens=100, deterministic=True).encoder_buckets == (100,)
    assert replace(SHAPE, max_tokens=1).encoder_buckets == (1,)
    assert replace(SHAPE, max_encoder_blocks=0).encoder_buckets == ()
