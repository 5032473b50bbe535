"""Control messages as bytes: nothing is lost, they stay small, and rubbish is told from them."""

import struct
import tracemalloc
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.control.message_wire import ROW_BYTES, decode_message, encode_message, most_bytes
from orca_jax.control.sampled_wire import asked, encode_sampled
from orca_jax.errors import BadFrame
from orca_jax.grammar.token_mask import n_words
from orca_jax.iteration.message import BIAS, SAMPLING, ControlMessage, neutral_sampling
from orca_jax.iteration.shape import EngineShape
from orca_jax.request.sampled import LOGPROBS, Sampled
from orca_jax.request.sampling_params import MAX_BIASES, REPETITION_RANGE, TEMPERATURE_RANGE, TOP_P_RANGE

SHAPE = EngineShape(
    block_size=4, max_blocks=8, max_rows=6, max_tokens=64, n_rows=12, n_blocks=64, vocab_size=300
)
WIDE = replace(SHAPE, n_blocks=1 << 17)  # blocks are numbered in 4 bytes
HEADER = 24


def message_of(rows: list[dict[str, Any]], iteration: int = 7) -> ControlMessage:
    """`rows`: row, initiation, index, kv_length, token_ids, blocks, n_prompt, bias, fields of SAMPLING."""
    table = np.zeros((len(rows), SHAPE.max_blocks), np.int32)
    for i, r in enumerate(rows):
        table[i, : len(r["blocks"])] = r["blocks"]

    def column(name: str, dtype: type) -> Any:
        return np.array([r[name] for r in rows], dtype)

    initiation = column("initiation", np.bool_)
    sampling = neutral_sampling(len(rows))
    columns: Any = sampling
    for name in SAMPLING.names or ():
        columns[name] = [r.get(name, columns[name][i]) for i, r in enumerate(rows)]
    return ControlMessage(
        iteration=iteration,
        row=column("row", np.int32),
        initiation=initiation,
        token_index=column("index", np.int32),
        input_length=np.array([len(r["token_ids"]) for r in rows], np.int32),
        kv_length=column("kv_length", np.int32),
        n_prompt=np.array([r.get("n_prompt", 0) for r in rows], np.int32),
        token_ids=np.concatenate([r["token_ids"] for r in rows]).astype(np.int32),
        token_on_device=~initiation,
        block_table=table,
        sampling=sampling,
        bias=np.array([(i, *pair) for i, r in enumerate(rows) for pair in r.get("bias", [])], BIAS),
    )


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    initiation = draw(st.booleans())
    kv_length = draw(st.integers(1, 10 if initiation else 32))
    n_input = kv_length if initiation else 1
    return {
        "row": draw(st.integers(0, 11)),
        "initiation": initiation,
        "index": draw(st.integers(0, 31)),
        "kv_length": kv_length,
        "token_ids": draw(st.lists(st.integers(0, 299), min_size=n_input, max_size=n_input)),
        # All that are reserved, more than are in use.
        "blocks": draw(st.lists(st.integers(0, 63), min_size=-(-kv_length // 4), max_size=8)),
        "n_prompt": draw(st.integers(0, n_input)) if initiation else 0,
        "bias": draw(st.lists(st.tuples(st.integers(0, 299), st.floats(-100, 100, width=32)), max_size=3)),
        "temperature": draw(st.floats(0, 100, width=32)),
        "top_p": draw(st.floats(0, 1, width=32)),
        "min_p": draw(st.floats(0, 1, width=32)),
        "repetition_penalty": draw(st.floats(0.015625, 100, width=32)),
        "frequency_penalty": draw(st.floats(-2, 2, width=32)),
        "presence_penalty": draw(st.floats(-2, 2, width=32)),
        "top_k": draw(st.integers(0, 1 << 30)),
        "logprobs": draw(st.integers(-1, 20)),
        "prompt_logprobs": draw(st.integers(-1, 20)),
        "flags": draw(st.integers(0, 3)),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
    }


messages = st.builds(message_of, st.lists(rows(), min_size=1, max_size=6), st.integers(0, 2**64 - 1))
ONE = {
    "row": 3,
    "initiation": False,
    "index": 2,
    "kv_length": 6,
    "token_ids": [9],
    "blocks": [5, 0, 7],
    "temperature": 0.5,
    "top_p": 1.0,
    "top_k": 0,
    "seed": -1,
}


@settings(deadline=None)
@given(messages, st.sampled_from([SHAPE, WIDE]))
def test_a_message_comes_back_as_it_was_with_the_blocks_in_use(message: ControlMessage, shape: EngineShape):
    back = decode_message(encode_message(message, shape), shape)
    in_use = np.arange(8) * 4 < message.kv_length[:, None]
    expected = replace(message, block_table=np.where(in_use, message.block_table, 0))
    for field in fields(ControlMessage):
        was, came = getattr(expected, field.name), getattr(back, field.name)
        if isinstance(was, np.ndarray):
            assert came.dtype == was.dtype and came.tolist() == was.tolist(), field.name
    assert back.iteration == message.iteration


def test_the_size_is_that_of_rows_blocks_in_use_and_tokens():
    assert len(encode_message(message_of([ONE]), SHAPE)) == HEADER + ROW_BYTES + 4 + 2 * 2
    assert len(encode_message(message_of([ONE]), WIDE)) == HEADER + ROW_BYTES + 4 + 4 * 2


@pytest.mark.parametrize(("n_blocks", "in_use"), [(1 << 16, 480), (1 << 17, 240)])
def test_a_row_in_its_increment_phase_stays_within_a_kilobyte(n_blocks: int, in_use: int):
    shape = EngineShape(
        block_size=16,
        max_blocks=in_use,
        max_rows=256,
        max_tokens=256,
        n_rows=256,
        n_blocks=n_blocks,
        vocab_size=300,
    )
    n = 256
    message = replace(
        message_of([ONE] * n),
        kv_length=np.full(n, in_use * 16, np.int32),
        block_table=np.full((n, in_use), n_blocks - 1, np.int32),
    )
    size = len(encode_message(message, shape))
    assert n * 1000 < size <= n * 1024 + 4096
    assert (decode_message(encode_message(message, shape), shape).block_table == n_blocks - 1).all()


def test_the_tokens_of_an_initiation_take_four_bytes_each_on_top():
    first = {**ONE, "initiation": True, "kv_length": 24, "token_ids": [1] * 24, "blocks": [1] * 6}
    assert len(encode_message(message_of([first]), SHAPE)) == HEADER + ROW_BYTES + 4 * 24 + 2 * 6


def altered(offset: int, form: str, value: float) -> bytes:
    data = bytearray(encode_message(message_of([ONE, ONE]), SHAPE))
    struct.pack_into(form, data, offset, value)
    return bytes(data)


SAMPLINGS = HEADER
INTEGERS = SAMPLINGS + 2 * SAMPLING.itemsize  # five columns of two rows
TOKENS = INTEGERS + 5 * 8
BLOCKS = TOKENS + 8


def field_of(name: str) -> int:
    """Where the first row has it."""
    fields_of: Any = SAMPLING.fields
    return SAMPLINGS + fields_of[name][1]


BIASED = {**ONE, "initiation": True, "kv_length": 1, "bias": [(5, 1.0)], "blocks": [1]}


def altered_bias(offset: int, form: str, value: float) -> bytes:
    data = bytearray(encode_message(message_of([BIASED]), SHAPE))
    struct.pack_into(form, data, HEADER + ROW_BYTES - 1 + 4 + offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "0 bytes came"),
        (encode_message(message_of([ONE]), SHAPE)[:-1], "make 92"),
        (encode_message(message_of([ONE]), SHAPE) + b"x", "make 92"),
        (altered(0, "<I", 0), "0 rows"),
        (altered(0, "<I", 7), "7 rows"),
        (altered(0, "<I", 2**32 - 1), "4294967295 rows"),
        (altered(4, "<I", 65), "65 tokens"),
        (altered(4, "<I", 1), "1 tokens"),
        (altered(INTEGERS, "<i", 12), "row 12 came"),
        (altered(INTEGERS + 4, "<i", -1), "row -1 came"),
        (altered(INTEGERS + 8, "<i", 33), "token_index 33 came"),
        (altered(INTEGERS + 16, "<i", 0), "input_length 0 came"),
        (altered(INTEGERS + 16, "<i", 2), "do not fit their tokens"),
        (altered(INTEGERS + 16, "<i", 7), "do not fit their tokens"),
        (altered(INTEGERS + 24, "<i", 33), "kv_length 33 came"),
        (altered(INTEGERS + 24, "<i", 4), "make 158"),
        (altered(INTEGERS + 32, "<i", -5), "n_prompt -5 came"),
        (altered(INTEGERS + 32, "<i", 1), "prompt is longer"),
        (altered(field_of("top_k"), "<i", -5), "top_k is out of range"),
        (altered(field_of("temperature"), "<f", -0.1), "temperature is out of range"),
        (altered(field_of("temperature"), "<f", float("inf")), "temperature is out of range"),
        (altered(field_of("top_p"), "<f", float("nan")), "top_p is out of range"),
        (altered(field_of("top_p"), "<f", 1.5), "top_p is out of range"),
        (altered(field_of("min_p"), "<f", -0.5), "min_p is out of range"),
        (altered(field_of("repetition_penalty"), "<f", 0), "repetition_penalty is out of range"),
        (altered(field_of("repetition_penalty"), "<f", 100.1), "repetition_penalty is out of range"),
        (altered(field_of("frequency_penalty"), "<f", float("nan")), "frequency_penalty is out of range"),
        (altered(field_of("presence_penalty"), "<f", float("inf")), "presence_penalty is out of range"),
        (altered(field_of("logprobs"), "<b", 21), "logprobs is out of range"),
        (altered(field_of("prompt_logprobs"), "<b", -2), "prompt_logprobs is out of range"),
        (altered(field_of("flags"), "<B", 4), "flags is out of range"),
        (altered(8, "<I", 2**32 - 1), "4294967295 biases"),
        (altered(12, "<I", 1), "2 rows, 2 tokens"),
        (altered_bias(0, "<i", 1), "a bias's place 1 came"),
        (altered_bias(4, "<i", 300), "token id 300 came"),
        (altered_bias(8, "<f", float("nan")), "a bias is not finite"),
        (altered(TOKENS, "<i", 300), "token id 300 came"),
        (altered(TOKENS + 4, "<i", -1), "token id -1 came"),
        (altered(BLOCKS, "<H", 64), "block 64 came"),
        (altered(BLOCKS + 8, "<B", 4), "flags"),
    ],
)
def test_what_no_master_sends_is_refused(data: bytes, complaint: str):
    with pytest.raises(BadFrame, match=complaint):
        decode_message(data, SHAPE)


def test_only_one_token_a_row_can_be_on_the_device():
    first = {**ONE, "initiation": True, "kv_length": 3, "token_ids": [1, 2, 3], "blocks": [1]}
    message = replace(message_of([first]), token_on_device=np.array([True]))
    with pytest.raises(BadFrame, match="on the device"):
        decode_message(encode_message(message, SHAPE), SHAPE)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400))
def test_rubbish_is_refused_and_nothing_else_is_raised(data: bytes):
    try:
        decode_message(data, SHAPE)
    except BadFrame:
        pass


@settings(deadline=None, max_examples=300)
@given(messages, st.data())
def test_a_damaged_message_is_refused_or_is_a_message(message: ControlMessage, data: st.DataObject):
    payload = bytearray(encode_message(message, SHAPE))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)))] if data.draw(st.booleans()) else payload
    try:
        back = decode_message(bytes(payload), SHAPE)
    except BadFrame:
        return
    assert len(encode_message(back, SHAPE)) == len(payload)


@pytest.mark.parametrize("n", [2**32 - 1, 1 << 20])
def test_a_header_that_lies_allocates_nothing(n: int):
    huge = replace(SHAPE, max_rows=1 << 12, max_tokens=1 << 20)
    data = struct.pack("<IIQ", n, n, 0) + bytes(64)
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            decode_message(data, huge)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_the_bounds_of_a_row_are_those_of_the_request():
    """As float32 rounds them."""
    sampling = neutral_sampling(4)
    sampling["temperature"] = (0, *TEMPERATURE_RANGE, 1)
    sampling["top_p"][:2] = TOP_P_RANGE
    sampling["repetition_penalty"][:2] = REPETITION_RANGE
    message = replace(message_of([ONE] * 4), sampling=sampling)
    np.testing.assert_array_equal(decode_message(encode_message(message, SHAPE), SHAPE).sampling, sampling)


def test_no_iteration_takes_more_bytes_than_the_wire_says():
    """Of every row the most biases, the most blocks, all words, and log-probabilities of every token."""
    shape = replace(SHAPE, n_blocks=48, max_tokens=60)
    biases = [(token_id % 300, 1.0) for token_id in range(MAX_BIASES)]
    row = ONE | {"initiation": True, "kv_length": 10, "token_ids": [1] * 10, "blocks": list(range(8))}
    message = message_of(
        [row | {"row": i, "n_prompt": 10, "bias": biases, "prompt_logprobs": 20} for i in range(6)]
    )
    assert len(encode_message(message, shape)) <= most_bytes(shape)
    records = np.zeros(6, LOGPROBS), {i: np.zeros(9, LOGPROBS) for i in range(6)}
    tokens = encode_sampled(Sampled(np.zeros(6, np.int32), *records), asked(message))
    assert len(tokens) <= most_bytes(shape)
    assert len(tokens) <= most_bytes(replace(shape, max_rows=6, vocab_size=32, n_blocks=1))
    wide = replace(shape, vocab_size=1 << 22)
    assert 6 * 4 * n_words(wide.vocab_size) <= most_bytes(wide)
