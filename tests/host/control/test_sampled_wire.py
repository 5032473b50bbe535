"""The results of an iteration as bytes: nothing is lost, and unrequested results are refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.control.message_wire import decode_message, encode_message
from orca_jax.control.sampled_wire import (
    ExpectedRecords,
    decode_routed,
    decode_sampled,
    encode_routed,
    encode_sampled,
    expected_records,
    join_stages,
)
from orca_jax.control.worker_pb2 import Tokens
from orca_jax.errors import BadFrame
from orca_jax.iteration.message import POOLS_ALL, POOLS_LAST, ROUTED
from orca_jax.request.routed_experts import Routing
from orca_jax.request.sampled import LOGPROBS, Sampled, token_logprobs
from tests.host.control.test_message_wire import ONE, SHAPE, message_of

VOCAB = 97


def records(n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    result: Any = np.zeros(n, LOGPROBS)
    result["token_id"] = rng.integers(0, VOCAB, n)
    result["logprob"] = rng.normal(-5, 2, n)
    result["top_ids"] = rng.integers(0, VOCAB, result["top_ids"].shape)
    result["top_logprobs"] = rng.normal(-5, 2, result["top_logprobs"].shape)
    return result


def test_tokens_alone_take_four_bytes_each() -> None:
    nothing_more = ExpectedRecords(3, np.array([], np.intp), ())
    sampled = Sampled(np.array([0, 5, 96, 7, 7], np.int32))  # padding behind the third
    data = encode_sampled(sampled, nothing_more)
    assert data == Tokens(token_ids=np.array([0, 5, 96], "<i4").tobytes())
    back = decode_sampled(data, nothing_more, vocab_size=VOCAB)
    assert back.token_ids.dtype == np.int32 and back.token_ids.tolist() == [0, 5, 96]
    assert back.logprobs is None and back.prompt_logprobs == {}


@given(n=st.integers(1, 6), data=st.data(), prompts=st.dictionaries(st.integers(0, 5), st.integers(0, 9)))
def test_requested_records_survive_the_wire(n: int, data: st.DataObject, prompts: dict[int, int]) -> None:
    wants = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    of = ExpectedRecords(n, wants, tuple((i, m) for i, m in prompts.items() if i < n))
    sampled = Sampled(
        np.arange(n + 2, dtype=np.int32),
        records(n + 2, 1) if len(wants) else None,
        {i: records(m + 1, i) for i, m in of.prompts},  # one more than was asked for
    )
    back = decode_sampled(encode_sampled(sampled, of), of, vocab_size=VOCAB)
    assert back.token_ids.tolist() == list(range(n))
    if len(wants):
        assert back.logprobs is not None and sampled.logprobs is not None
        assert back.logprobs[wants].tobytes() == sampled.logprobs[wants].tobytes()
    assert set(back.prompt_logprobs) == {i for i, _ in of.prompts}
    for i, m in of.prompts:
        assert back.prompt_logprobs[i].tobytes() == sampled.prompt_logprobs[i][:m].tobytes()


def test_the_message_has_the_requested_logprobs() -> None:
    plain = {**ONE, "logprobs": -1}
    first = {**ONE, "initiation": True, "kv_length": 4, "token_ids": [1, 2, 3, 4], "n_prompt": 3}
    message = message_of([plain, {**plain, "logprobs": 0}, {**first, "logprobs": 5, "prompt_logprobs": 2}])
    of = expected_records(message)
    assert of.n_rows == 3 and of.logprobs.tolist() == [1, 2] and of.prompts == ((2, 2),)


@pytest.mark.parametrize(
    ("start", "end", "n_scored"), [(0, 3, 3), (3, 6, 3), (6, 9, 2), (7, 9, 1), (8, 9, 0), (9, 11, 0)]
)
def test_a_piece_scores_the_tokens_after_its_own_up_to_the_prompt_s_last(start: int, end: int, n_scored: int):
    """Tokens 1 to 8 of a prompt of nine are scored: token i + 1 by the logits of token i."""
    piece = {**ONE, "initiation": True, "kv_length": end, "token_ids": [1] * (end - start), "n_prompt": 9}
    of = expected_records(message_of([{**piece, "next_token": 7, "prompt_logprobs": 0}]))
    assert of.prompts == ((0, n_scored),)


@pytest.mark.parametrize(
    ("token_ids", "complaint"),
    [
        ([1, 2], "the tokens of 3 requests have 8 bytes"),
        ([1, 2, 3, 4], "16 bytes"),
        ([1, 97, 3], "token id 97 is not"),
        ([1, -1, 3], "token id -1"),
    ],
)
def test_tokens_that_cannot_be_are_refused(token_ids: list[int], complaint: str) -> None:
    nothing_more = ExpectedRecords(3, np.array([], np.intp), ())
    with pytest.raises(BadFrame, match=complaint):
        decode_sampled(Tokens(token_ids=np.array(token_ids, "<i4").tobytes()), nothing_more, vocab_size=VOCAB)


@pytest.mark.parametrize("name", ["token_id", "top_ids"])
@pytest.mark.parametrize("of_prompt", [False, True])
def test_records_of_tokens_that_there_are_not_are_refused(name: str, of_prompt: bool) -> None:
    of = ExpectedRecords(1, np.array([0], np.intp), ((0, 1),))
    right, wrong = records(1, 0), records(1, 0)
    wrong[name] = VOCAB
    both = (right, {0: wrong}) if of_prompt else (wrong, {0: right})
    data = encode_sampled(Sampled(np.array([3], np.int32), *both), of)
    with pytest.raises(BadFrame, match="token id 97 is not"):
        decode_sampled(data, of, vocab_size=VOCAB)


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("change", [-1, 1])
def test_unexpected_lengths_are_refused(field: str, change: int) -> None:
    of = ExpectedRecords(2, np.array([1], np.intp), ((0, 3),))
    payload = encode_sampled(Sampled(np.array([3, 4], np.int32), records(2, 0), {0: records(3, 1)}), of)
    decode_sampled(payload, of, vocab_size=VOCAB)
    data = getattr(payload, field)
    setattr(payload, field, data + b"x" if change > 0 else data[:-1])
    with pytest.raises(
        BadFrame, match=rf"of 2 requests have {len(data) + change} bytes; they need {len(data)}"
    ):
        decode_sampled(payload, of, vocab_size=VOCAB)


def test_pooled_hidden_states_survive_the_wire_and_others_are_refused() -> None:
    flags = [POOLS_LAST, 0, POOLS_ALL]
    first = {**ONE, "initiation": True, "kv_length": 4, "token_ids": [1, 2, 3, 4], "n_prompt": 4}
    message = message_of([{**first, "flags": flag} for flag in flags])
    assert message.n_pooled.tolist() == [1, 0, 4]
    of = expected_records(message)
    assert of.pooled == (0, 2)
    vectors = {0: np.array([0.5, -1, 3], np.float32), 2: np.array([2, 1e-9, 7], np.float32)}
    payload = encode_sampled(Sampled(np.array([1, 2, 3], np.int32), pooled=vectors), of)
    assert len(payload.pooled) == 2 * 3 * 4
    back = decode_sampled(payload, of, vocab_size=VOCAB, embedding_size=3)
    assert {place: vector.tolist() for place, vector in back.pooled.items()} == {
        place: vector.tolist() for place, vector in vectors.items()
    }
    with pytest.raises(BadFrame, match="hidden states of 3 requests have 24 bytes; they need 32"):
        decode_sampled(payload, of, vocab_size=VOCAB, embedding_size=4)
    with pytest.raises(BadFrame, match="a row pools hidden states that it does not have"):
        decode_message(encode_message(message, SHAPE), SHAPE)  # an engine without embeddings
    decode_message(encode_message(message, SHAPE), replace(SHAPE, embedding_size=3))
    decode = message_of([{**ONE, "flags": POOLS_LAST}])
    with pytest.raises(BadFrame, match="it decodes"):
        decode_message(encode_message(decode, SHAPE), replace(SHAPE, embedding_size=3))


def test_unrequested_records_are_refused() -> None:
    nothing_more = ExpectedRecords(1, np.array([], np.intp), ())
    payload = Tokens(token_ids=bytes(4), prompt_logprobs=records(1, 0).tobytes())
    with pytest.raises(BadFrame, match=r"prompt log-probabilities of 1 requests have .* bytes; they need 0"):
        decode_sampled(payload, nothing_more, vocab_size=VOCAB)


def test_a_record_has_as_many_top_tokens_as_requested() -> None:
    record: Any = records(1, 0)
    record["top_logprobs"][0, 2:] = -np.inf  # of a vocabulary of two
    logprobs = token_logprobs(record[0], 20)
    assert logprobs.token_id == record["token_id"][0] and logprobs.logprob == record["logprob"][0]
    ids, values = record["top_ids"][0], record["top_logprobs"][0]
    assert logprobs.top == ((ids[0], values[0]), (ids[1], values[1]))
    assert token_logprobs(record[0], 1).top == ((ids[0], values[0]),)
    assert token_logprobs(record[0], 0).top == ()


ROWS = ((0, 3), (2, 1))


@pytest.mark.parametrize(("n_experts", "width"), [(8, 1), (256, 1), (257, 2), (1 << 16, 2)])
def test_experts_come_back_as_they_were(n_experts: int, width: int) -> None:
    routing, rng = Routing(5, 2, n_experts), np.random.default_rng(0)
    routed = {place: rng.integers(0, n_experts, (n, 4, 2)).astype(routing.dtype) for place, n in ROWS}
    data = encode_routed(routed, ROWS, routing)
    assert len(data) == 4 * 4 * 2 * width
    back = decode_routed(data, ROWS, routing)
    assert back.keys() == routed.keys()
    for place, ids in routed.items():
        np.testing.assert_array_equal(back[place], ids)


def test_the_bytes_of_experts_are_rows_of_tokens_of_layers() -> None:
    routing = Routing(2, 2, 300)
    routed = {0: np.array([[[1, 2], [3, 256]]], np.uint16)}
    assert encode_routed(routed, [(0, 1)], routing) == bytes([1, 0, 2, 0, 3, 0, 0, 1])


def test_a_stage_without_experts_sends_nothing() -> None:
    assert encode_routed({}, ROWS, Routing(2, 2, 8)) == b""
    assert {i: ids.shape for i, ids in decode_routed(b"", ROWS, Routing(2, 2, 8)).items()} == {
        0: (3, 0, 2),
        2: (1, 0, 2),
    }


@pytest.mark.parametrize("n_bytes", [1, 7, 9, 24])
def test_other_lengths_of_experts_are_refused(n_bytes: int) -> None:
    """Four tokens of at most two layers with two experts each take 8 bytes a layer."""
    with pytest.raises(BadFrame, match=f"the experts of 4 tokens have {n_bytes} bytes; they need 8 for each"):
        decode_routed(bytes(n_bytes), ROWS, Routing(2, 2, 8))


def test_an_unknown_expert_is_refused() -> None:
    with pytest.raises(BadFrame, match="an expert is 8; there are 0 to 7"):
        decode_routed(bytes([0, 8]), [(0, 1)], Routing(1, 2, 8))


def test_the_stages_layers_are_joined_in_order() -> None:
    def stage(*layers: int) -> dict[int, np.ndarray]:
        return {0: np.array(layers, np.uint8).reshape(1, -1, 1)}

    rows, routing = [(0, 1)], Routing(3, 1, 8)
    joined = join_stages([stage(4), stage(), stage(5, 6)], rows, routing)
    assert joined[0].ravel().tolist() == [4, 5, 6]
    with pytest.raises(BadFrame, match="the stages reported 2 layers with experts; there are 3"):
        join_stages([stage(4), stage(5)], rows, routing)


def test_the_rows_that_ask_are_expected_with_all_their_tokens() -> None:
    prompt = {**ONE, "initiation": True, "kv_length": 4, "token_ids": [1, 2, 3, 4], "n_prompt": 4}
    message = message_of([{**prompt, "flags": ROUTED}, ONE, {**ONE, "flags": ROUTED}])
    assert expected_records(message).routed == ((0, 4), (2, 1))
    assert expected_records(message_of([ONE])).routed == ()
