"""Control messages as bytes: lossless and small; malformed ones are rejected."""

import tracemalloc
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.control import worker_pb2
from orca_jax.control.frame import MESSAGE, TOKENS, WORDS, Frame, FrameKind, encode_frame
from orca_jax.control.message_wire import ROW_BYTES, decode_message, encode_message, most_bytes
from orca_jax.control.sampled_wire import encode_sampled, expected_records
from orca_jax.errors import BadFrame
from orca_jax.grammar.token_mask import n_words
from orca_jax.iteration.message import ADJUSTED, BIAS, SAMPLED, SAMPLING, ControlMessage, neutral_sampling
from orca_jax.iteration.shape import EngineShape
from orca_jax.request.sampled import LOGPROBS, Sampled
from orca_jax.request.sampling_params import MAX_BIASES, REPETITION_RANGE, TEMPERATURE_RANGE, TOP_P_RANGE

SHAPE = EngineShape(
    block_size=4,
    max_blocks=8,
    max_rows=6,
    max_tokens=64,
    n_rows=12,
    n_blocks=64,
    vocab_size=300,
    max_adapters=3,
    adapter_rank=16,
)
WIDE = replace(SHAPE, n_blocks=1 << 17)  # blocks are numbered in 4 bytes


def message_of(rows: list[dict[str, Any]]) -> ControlMessage:
    """`rows`: row, initiation, index, kv_length, token_ids, blocks, n_prompt, next_token, earlier_ids, bias,
    fields of SAMPLING.
    """
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
        row=column("row", np.int32),
        initiation=initiation,
        token_index=column("index", np.int32),
        input_length=np.array([len(r["token_ids"]) for r in rows], np.int32),
        kv_length=column("kv_length", np.int32),
        n_prompt=np.array([r.get("n_prompt", 0) for r in rows], np.int32),
        next_token=np.array([r.get("next_token", SAMPLED) for r in rows], np.int32),
        token_ids=np.concatenate([r["token_ids"] for r in rows]).astype(np.int32),
        earlier_ids=np.array([t for r in rows for t in r.get("earlier_ids", ())], np.int32),
        token_on_device=np.array(
            [not r["initiation"] and r.get("next_token", SAMPLED) == SAMPLED for r in rows]
        ),
        block_table=table,
        sampling=sampling,
        adapter=column("adapter", np.int32) if any(r.get("adapter") for r in rows) else None,
        bias=np.array([(i, *pair) for i, r in enumerate(rows) for pair in r.get("bias", [])], BIAS),
    )


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    initiation = draw(st.booleans())
    kv_length = draw(st.integers(1, 10 if initiation else 32))
    n_input = draw(st.integers(1, kv_length)) if initiation else 1
    next_token = draw(st.sampled_from([SAMPLED, SAMPLED, 0, 299]))
    flags = draw(st.integers(0, 3))
    n_earlier = kv_length - n_input if initiation and next_token == SAMPLED and flags & ADJUSTED else 0
    return {
        "row": draw(st.integers(0, 11)),
        "initiation": initiation,
        "index": draw(st.integers(0, 31)),
        "kv_length": kv_length,
        "token_ids": draw(st.lists(st.integers(0, 299), min_size=n_input, max_size=n_input)),
        # All that are reserved, more than are in use.
        "blocks": draw(st.lists(st.integers(0, 63), min_size=-(-kv_length // 4), max_size=8)),
        "n_prompt": draw(st.integers(0, kv_length if next_token == SAMPLED else 32)) if initiation else 0,
        "next_token": next_token,
        "earlier_ids": draw(st.lists(st.integers(0, 299), min_size=n_earlier, max_size=n_earlier)),
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
        "flags": flags,
        "adapter": draw(st.integers(0, 3)),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
    }


messages = st.builds(message_of, st.lists(rows(), min_size=1, max_size=6))
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
        elif was is None:
            assert came is None, field.name


def size(message: ControlMessage, shape: EngineShape = SHAPE) -> int:
    """Bytes of the arrays."""
    payload = encode_message(message, shape)
    return sum(len(value) for _, value in payload.ListFields())


def test_the_size_is_that_of_rows_blocks_in_use_and_tokens():
    assert ROW_BYTES == 64
    assert size(message_of([ONE])) == ROW_BYTES + 4 + 2 * 2
    assert size(message_of([ONE]), WIDE) == ROW_BYTES + 4 + 4 * 2


@given(messages)
def test_fields_add_little_to_the_arrays(message: ControlMessage):
    whole = encode_frame(Frame(MESSAGE, 2**64 - 1, 2**64 - 1, 0, encode_message(message, SHAPE)))
    assert len(whole) <= size(message) + 96


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
    whole = encode_frame(Frame(MESSAGE, 1 << 62, 1 << 30, 0, encode_message(message, shape)))
    assert n * 1000 < len(whole) <= n * 1024 + 4096
    assert (decode_message(encode_message(message, shape), shape).block_table == n_blocks - 1).all()


def test_the_tokens_of_an_initiation_take_four_bytes_each_on_top():
    first = {**ONE, "initiation": True, "kv_length": 24, "token_ids": [1] * 24, "blocks": [1] * 6}
    assert size(message_of([first])) == ROW_BYTES + 4 * 24 + 2 * 6


def test_earlier_tokens_take_four_bytes_each():
    assert size(message_of([REST])) == ROW_BYTES + 4 + 2 + 4 * 2


# The first two of a prompt of three tokens; and the rest of one whose first two are in the cache.
CUT = {**ONE, "initiation": True, "kv_length": 2, "token_ids": [4, 5], "blocks": [1], "n_prompt": 3}
REST = {**CUT, "kv_length": 3, "token_ids": [6], "flags": ADJUSTED, "earlier_ids": [4, 5]}
ADAPTED = {**ONE, "adapter": 3}
BIASED = {**ONE, "initiation": True, "kv_length": 1, "bias": [(5, 1.0)], "blocks": [1]}


def altered(field: str, at: Any, value: float, rows: list[dict[str, Any]] | None = None) -> Any:
    """The payload of two rows with one element of one array changed, or one field of its first record."""
    payload = encode_message(message_of(rows or [ONE, ONE]), SHAPE)
    dtypes = {"sampling": SAMPLING, "bias": BIAS, "flags": np.dtype("u1"), "blocks": np.dtype("<u2")}
    array: Any = np.frombuffer(getattr(payload, field), dtypes.get(field, np.dtype("<i4"))).copy()
    (array if isinstance(at, int) else array[at])[at if isinstance(at, int) else 0] = value
    setattr(payload, field, array.tobytes())
    return payload


def resized(field: str, change: int, rows: list[dict[str, Any]] | None = None) -> Any:
    """The payload of one row with an array that many bytes longer or shorter."""
    payload = encode_message(message_of(rows or [ONE]), SHAPE)
    data = getattr(payload, field)
    setattr(payload, field, data + bytes(change) if change > 0 else data[:change])
    return payload


ROWS, TOKEN_INDEX, INPUT_LENGTH, KV_LENGTH, N_PROMPT, NEXT_TOKEN = 0, 2, 4, 6, 8, 10  # for two rows


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (worker_pb2.Iteration(), "0 rows and 0 tokens"),
        (encode_message(message_of([ONE] * 7), SHAPE), "7 rows"),
        (worker_pb2.Iteration(integers=bytes(1 << 20)), "43690 rows"),
        (resized("token_ids", 4 * 64), "65 tokens"),
        (resized("token_ids", -4), "1 rows and 0 tokens"),
        (resized("token_ids", 1), "token_ids has 5 bytes; its 1 elements take 4"),
        (resized("token_ids", 4), "do not match their tokens"),
        (resized("integers", 1), "integers has 25 bytes; its 6 elements take 24"),
        (resized("integers", -1), "0 rows"),
        (resized("sampling", 1), "sampling has 40 bytes; its 1 elements take 39"),
        (resized("sampling", -39), "sampling has 0 bytes"),
        (resized("flags", 1), "flags has 2 bytes; its 1 elements take 1"),
        (resized("flags", -1), "flags has 0 bytes"),
        (resized("blocks", 2), "blocks has 6 bytes; its 2 elements take 4"),
        (resized("blocks", -1), "blocks has 3 bytes; its 2 elements take 4"),
        (resized("bias", 1), "bias has 1 bytes; its 0 elements take 0"),
        (altered("integers", ROWS, 12), "has row 12;"),
        (altered("integers", ROWS + 1, -1), "has row -1;"),
        (altered("integers", TOKEN_INDEX, 33), "has token_index 33;"),
        (altered("integers", INPUT_LENGTH, 0), "has input_length 0;"),
        (altered("integers", INPUT_LENGTH, 2), "do not match their tokens"),
        (altered("integers", INPUT_LENGTH, 7), "do not match their tokens"),
        (altered("integers", KV_LENGTH, 33), "has kv_length 33;"),
        (altered("integers", KV_LENGTH, 4), "blocks has 8 bytes; its 3 elements take 6"),
        (altered("integers", N_PROMPT, -5), "has n_prompt -5;"),
        (altered("integers", N_PROMPT, 1), "a decode row has a prompt"),
        (altered("integers", NEXT_TOKEN, -2), "has next_token -2;"),
        (altered("integers", NEXT_TOKEN, 300), "has next_token 300;"),
        (altered("integers", NEXT_TOKEN, 5), "is on the device, but its next token is known"),
        (encode_message(message_of([CUT]), SHAPE), "before the end of its prompt"),
        (resized("earlier_ids", -4, [REST]), "1 earlier tokens came, but the rows that need them have 2"),
        (resized("earlier_ids", 4), "1 earlier tokens came, but the rows that need them have 0"),
        (resized("earlier_ids", 1), "earlier_ids has 1 bytes"),
        (altered("earlier_ids", 1, 300, [REST]), "has token id 300;"),
        (altered("sampling", "top_k", -5), "top_k is out of range"),
        (altered("sampling", "temperature", -0.1), "temperature is out of range"),
        (altered("sampling", "temperature", float("inf")), "temperature is out of range"),
        (altered("sampling", "top_p", float("nan")), "top_p is out of range"),
        (altered("sampling", "top_p", 1.5), "top_p is out of range"),
        (altered("sampling", "min_p", -0.5), "min_p is out of range"),
        (altered("sampling", "repetition_penalty", 0), "repetition_penalty is out of range"),
        (altered("sampling", "repetition_penalty", 100.1), "repetition_penalty is out of range"),
        (altered("sampling", "frequency_penalty", float("nan")), "frequency_penalty is out of range"),
        (altered("sampling", "presence_penalty", float("inf")), "presence_penalty is out of range"),
        (altered("sampling", "logprobs", 21), "logprobs is out of range"),
        (altered("sampling", "prompt_logprobs", -2), "prompt_logprobs is out of range"),
        (altered("sampling", "flags", 128), "flags is out of range"),
        (altered("sampling", "flags", 32), "a row counts drafts"),
        (altered("bias", "index", 1, [BIASED]), "has a bias's place 1;"),
        (altered("bias", "token_id", 300, [BIASED]), "has token id 300;"),
        (altered("bias", "value", float("nan"), [BIASED]), "a bias is not finite"),
        (resized("adapters", 3), "adapters has 3 bytes; its 1 elements take 4"),
        (altered("adapters", 0, 4, [ADAPTED]), "has adapter 4;"),
        (altered("adapters", 0, -1, [ADAPTED]), "has adapter -1;"),
        (altered("token_ids", 0, 300), "has token id 300;"),
        (altered("token_ids", 1, -1), "has token id -1;"),
        (altered("blocks", 0, 64), "has block 64"),
        (altered("flags", 0, 4), "flags"),
    ],
)
def test_messages_that_no_master_sends_are_refused(payload: worker_pb2.Iteration, complaint: str):
    with pytest.raises(BadFrame, match=complaint):
        decode_message(payload, SHAPE)


def test_only_one_token_a_row_can_be_on_the_device():
    first = {**ONE, "initiation": True, "kv_length": 3, "token_ids": [1, 2, 3], "blocks": [1]}
    message = replace(message_of([first]), token_on_device=np.array([True]))
    with pytest.raises(BadFrame, match="on the device"):
        decode_message(encode_message(message, SHAPE), SHAPE)


FIELDS = (
    "sampling",
    "integers",
    "flags",
    "token_ids",
    "earlier_ids",
    "blocks",
    "bias",
    "copies",
    "adapters",
    "put_adapters",
)


@settings(deadline=None, max_examples=300)
@given(st.fixed_dictionaries({}, optional={name: st.binary(max_size=160) for name in FIELDS}))
def test_rubbish_is_refused_and_nothing_else_is_raised(fields: dict[str, Any]):
    try:
        decode_message(worker_pb2.Iteration(**fields), SHAPE)
    except BadFrame:
        pass


@settings(deadline=None, max_examples=300)
@given(messages, st.data())
def test_a_damaged_message_is_refused_or_is_a_message(message: ControlMessage, data: st.DataObject):
    """Whatever bytes of whatever field are changed, and wherever it is cut; the checksum is not asked."""
    payload = encode_message(message, SHAPE)
    for _ in range(data.draw(st.integers(1, 4))):
        field = data.draw(st.sampled_from([name for name in FIELDS if getattr(payload, name)]))
        array = bytearray(getattr(payload, field))
        array[data.draw(st.integers(0, len(array) - 1))] = data.draw(st.integers(0, 255))
        end = data.draw(st.integers(0, len(array))) if data.draw(st.booleans()) else len(array)
        setattr(payload, field, bytes(array[:end]))
        if not any(getattr(payload, name) for name in FIELDS):
            break
    try:
        back = decode_message(payload, SHAPE)
    except BadFrame:
        return
    again = encode_message(back, SHAPE)
    assert [len(getattr(again, name)) for name in FIELDS] == [len(getattr(payload, name)) for name in FIELDS]


@pytest.mark.parametrize("n", [1 << 12, 1 << 16])
def test_a_wrong_length_allocates_nothing(n: int):
    """A message that claims a full batch of rows, or more, is refused before any block table is allocated."""
    huge = replace(SHAPE, max_rows=1 << 12, max_tokens=1 << 20, max_blocks=1 << 21, n_blocks=1 << 31)
    payload = worker_pb2.Iteration(integers=bytes(24 * n), token_ids=bytes(4 * n))
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            decode_message(payload, huge)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000 + 28 * n


def test_the_bounds_of_a_row_are_those_of_the_request():
    """Compared after rounding to float32."""
    sampling = neutral_sampling(4)
    sampling["temperature"] = (0, *TEMPERATURE_RANGE, 1)
    sampling["top_p"][:2] = TOP_P_RANGE
    sampling["repetition_penalty"][:2] = REPETITION_RANGE
    message = replace(message_of([ONE] * 4), sampling=sampling)
    np.testing.assert_array_equal(decode_message(encode_message(message, SHAPE), SHAPE).sampling, sampling)


def test_no_iteration_exceeds_the_wire_s_limit():
    """Every row has the most biases, blocks and words, and every token has log-probabilities."""
    shape = replace(SHAPE, n_blocks=48, max_tokens=60)
    biases = [(token_id % 300, 1.0) for token_id in range(MAX_BIASES)]
    row = ONE | {"initiation": True, "kv_length": 10, "token_ids": [1] * 10, "blocks": list(range(8))}
    message = message_of(
        [row | {"row": i, "n_prompt": 10, "bias": biases, "prompt_logprobs": 20} for i in range(6)]
    )

    def size_of(kind: FrameKind, payload: Any) -> int:
        return len(encode_frame(Frame(kind, 2**64 - 1, 2**64 - 1, 2**32 - 1, payload)))

    assert size_of(MESSAGE, encode_message(message, shape)) <= most_bytes(shape)
    records = np.zeros(6, LOGPROBS), {i: np.zeros(9, LOGPROBS) for i in range(6)}
    tokens = encode_sampled(Sampled(np.zeros(6, np.int32), *records), expected_records(message))
    assert size_of(TOKENS, tokens) <= most_bytes(shape)
    assert size_of(TOKENS, tokens) <= most_bytes(replace(shape, max_rows=6, vocab_size=32, n_blocks=1))
    wide = replace(shape, vocab_size=1 << 22)
    assert size_of(WORDS, bytes(6 * 4 * n_words(wide.vocab_size))) <= most_bytes(wide)


def test_copies_of_blocks_go_over_the_wire() -> None:
    copies = np.array([[3, 9], [3, 10], [0, 63]], np.int32)
    message = replace(message_of([ONE] * 3), copies=copies)
    np.testing.assert_array_equal(decode_message(encode_message(message, SHAPE), SHAPE).copies, copies)


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([[3, 64]], "a copied block 64; it must be 0 to 63"),
        ([[-1, 5]], "a copied block -1; it must be 0 to 63"),
        ([[3, 9], [4, 9]], "2 copies of blocks came; at most 6 are allowed, each to a block of its own"),
        ([[3, 9], [9, 4]], "each to a block of its own that is not copied itself"),
        ([[3, 10 + i] for i in range(7)], "7 copies of blocks came; at most 6"),
    ],
)
def test_copies_that_no_engine_master_sends_are_refused(copies: list[list[int]], message: str) -> None:
    sent = replace(message_of([ONE]), copies=np.array(copies, np.int32))
    with pytest.raises(BadFrame, match=message):
        decode_message(encode_message(sent, SHAPE), SHAPE)


def test_adapters_for_slots_go_over_the_wire() -> None:
    put = np.array([[(1 << 31) - 1, 2], [0, 0]], np.int32)
    message = replace(message_of([ONE]), put_adapters=put)
    np.testing.assert_array_equal(decode_message(encode_message(message, SHAPE), SHAPE).put_adapters, put)
    for wrong, complaint in (
        ([[0, 3]], "an adapter's slot 3; it must be 0 to 2"),
        ([[-1, 0]], "an adapter's version -1; it must be 0"),
        ([[4, 1], [5, 1]], "two adapters came for one slot"),
    ):
        sent = replace(message, put_adapters=np.array(wrong, np.int32))
        with pytest.raises(BadFrame, match=complaint):
            decode_message(encode_message(sent, SHAPE), SHAPE)
    with pytest.raises(BadFrame, match="it must be 0 to -1"):
        decode_message(encode_message(message, SHAPE), replace(SHAPE, max_adapters=0))


WITH_HOST = replace(SHAPE, n_host_blocks=5)


def test_copies_to_the_host_and_from_it_go_over_the_wire() -> None:
    out, into = np.array([[63, 4], [0, 0]], np.int32), np.array([[4, 1], [4, 2]], np.int32)
    message = replace(message_of([ONE]), to_host=out, from_host=into)
    decoded = decode_message(encode_message(message, WITH_HOST), WITH_HOST)
    np.testing.assert_array_equal(decoded.to_host, out)
    np.testing.assert_array_equal(decoded.from_host, into)
    with pytest.raises(BadFrame, match="a place of the host tier 4; it must be 0 to -1"):
        decode_message(encode_message(message, SHAPE), SHAPE)
    for name, wrong, complaint in (
        ("to_host", [[64, 0]], "a block of the host tier 64; it must be 0 to 63"),
        ("to_host", [[0, 5]], "a place of the host tier 5; it must be 0 to 4"),
        ("to_host", [[1, 0], [2, 0]], "2 copies to_host came; each must have a target of its own"),
        ("from_host", [[-1, 0]], "a place of the host tier -1; it must be 0 to 4"),
        ("from_host", [[0, 64]], "a block of the host tier 64; it must be 0 to 63"),
        ("from_host", [[1, 0], [2, 0]], "2 copies from_host came; each must have a target of its own"),
    ):
        sent = replace(message, **{name: np.array(wrong, np.int32)})
        with pytest.raises(BadFrame, match=complaint):
            decode_message(encode_message(sent, WITH_HOST), WITH_HOST)


HYBRID = replace(SHAPE, states=True, n_snapshots=3)  # the snapshots are states 12 to 14


def test_states_go_to_the_host_after_the_blocks_and_to_places_after_theirs() -> None:
    """Blocks are 0 to 63 and states 64 to 78; places of blocks are 0 to 4 and of states 5 and 6."""
    shape = replace(HYBRID, n_host_blocks=5, n_host_states=2)
    out, into = np.array([[63, 4], [64, 5], [78, 6]], np.int32), np.array([[4, 1], [5, 77]], np.int32)
    message = replace(message_of([ONE]), to_host=out, from_host=into)
    decoded = decode_message(encode_message(message, shape), shape)
    np.testing.assert_array_equal(decoded.to_host, out)
    np.testing.assert_array_equal(decoded.from_host, into)
    for name, wrong, complaint in (
        ("to_host", [[79, 5]], "a block of the host tier 79; it must be 0 to 78"),
        ("to_host", [[64, 7]], "a place of the host tier 7; it must be 0 to 6"),
        ("to_host", [[64, 4]], "copies to_host came between blocks and places of states"),
        ("from_host", [[5, 63]], "copies from_host came between blocks and places of states"),
        ("from_host", [[5, 77], [6, 77]], "2 copies from_host came; each must have a target of its own"),
    ):
        sent = replace(message, **{name: np.array(wrong, np.int32)})
        with pytest.raises(BadFrame, match=complaint):
            decode_message(encode_message(sent, shape), shape)


def test_copies_of_states_go_over_the_wire() -> None:
    before, after = np.array([[12, 1], [12, 2]], np.int32), np.array([[1, 14]], np.int32)
    rows = [ONE | {"row": row} for row in (1, 2)]
    message = replace(message_of(rows), states_before=before, states_after=after)
    decoded = decode_message(encode_message(message, HYBRID), HYBRID)
    np.testing.assert_array_equal(decoded.states_before, before)
    np.testing.assert_array_equal(decoded.states_after, after)
    with pytest.raises(BadFrame, match="a copied state 12; it must be 12 to 11"):
        decode_message(encode_message(message, SHAPE), SHAPE)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([[15, 1]], [], "a copied state 15; it must be 12 to 14"),
        ([[12, 3]], [], "each must be between a row of the iteration and a snapshot"),
        ([[12, 1], [13, 1]], [], "2 copies of states came; .* to a state of its own"),
        ([[12, 12]], [], "a row's state 12; it must be 0 to 11"),
        ([], [[3, 13]], "each must be between a row of the iteration and a snapshot"),
        ([], [[1, 2]], "a snapshot 2; it must be 12 to 14"),
        ([], [[1, 13], [2, 13]], "2 copies of states came; .* to a state of its own"),
    ],
)
def test_copies_of_states_that_no_engine_master_sends_are_refused(
    before: list[list[int]], after: list[list[int]], message: str
) -> None:
    rows = [ONE | {"row": row} for row in (1, 2)]
    pairs = {
        name: np.array(copies, np.int32).reshape(-1, 2)
        for name, copies in (("states_before", before), ("states_after", after))
    }
    sent = replace(message_of(rows), **pairs)
    with pytest.raises(BadFrame, match=message):
        decode_message(encode_message(sent, HYBRID), HYBRID)


# States 15 to 18 are for drafts.
WITH_DRAFTS = replace(HYBRID, drafts=True, n_draft_states=4, max_drafts=2)


def drafted(kept: list[list[int]], before: list[list[int]], after: list[list[int]]) -> ControlMessage:
    """A message of a row for request 1, three for request 2, and one for request 3."""
    rows = [ONE | {"row": row} for row in (1, 2, 2, 2, 3)]
    pairs = {"states_kept": kept, "states_before": before, "states_after": after}
    arrays = {name: np.array(each, np.int32).reshape(-1, 2) for name, each in pairs.items()}
    return replace(message_of(rows), **arrays)


def test_states_after_drafts_go_over_the_wire() -> None:
    """One is undone at a row that is not in the iteration, and one becomes a snapshot."""
    message = drafted([[1, 18], [2, 15]], [[16, 7], [12, 1]], [[15, 13], [2, 14]])
    decoded = decode_message(encode_message(message, WITH_DRAFTS), WITH_DRAFTS)
    for name in ("states_kept", "states_before", "states_after"):
        np.testing.assert_array_equal(getattr(decoded, name), getattr(message, name))


@pytest.mark.parametrize(
    ("kept", "before", "after", "message"),
    [
        ([[5, 15]], [], [], "a drafted row 5; it must be 0 to 4"),
        ([[1, 14]], [], [], "a state after a draft 14; it must be 15 to 18"),
        ([[1, 19]], [], [], "a state after a draft 19; it must be 15 to 18"),
        ([[1, 15], [2, 15]], [], [], "a row that another one of its request follows, and have a place"),
        ([[1, 15], [1, 16]], [], [], "a row that another one of its request follows, and have a place"),
        ([[3, 15]], [], [], "a row that another one of its request follows, and have a place"),
        ([[4, 15]], [], [], "a row that another one of its request follows, and have a place"),
        ([], [[15, 12]], [], "a row's state 12; it must be 0 to 11"),
        ([[1, 15]], [], [[16, 13]], "each must be between a row of the iteration and a snapshot"),
    ],
)
def test_states_after_drafts_that_no_engine_master_sends_are_refused(
    kept: list[list[int]], before: list[list[int]], after: list[list[int]], message: str
) -> None:
    sent = drafted(kept, before, after)
    with pytest.raises(BadFrame, match=message):
        decode_message(encode_message(sent, WITH_DRAFTS), WITH_DRAFTS)


def test_a_request_has_no_more_drafts_than_its_engine_allows() -> None:
    one = replace(WITH_DRAFTS, max_drafts=1)
    with pytest.raises(BadFrame, match="a request has 2 drafts; at most 1 are allowed"):
        decode_message(encode_message(drafted([[1, 18], [2, 15]], [], []), one), one)
