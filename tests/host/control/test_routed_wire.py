"""The experts of rows' tokens as bytes: nothing is lost, and what no worker sends is refused."""

import numpy as np
import pytest

from orca_jax.control.routed_wire import decode_routed, encode_routed, join_stages
from orca_jax.control.sampled_wire import expected_records
from orca_jax.errors import BadFrame
from orca_jax.iteration.message import ROUTED
from orca_jax.request.routed_experts import Routing
from tests.host.control.test_message_wire import ONE, message_of

ROWS = ((0, 3), (2, 1))


@pytest.mark.parametrize(("n_experts", "width"), [(8, 1), (256, 1), (257, 2), (1 << 16, 2)])
def test_they_come_back_as_they_were(n_experts: int, width: int) -> None:
    routing, rng = Routing(5, 2, n_experts), np.random.default_rng(0)
    routed = {place: rng.integers(0, n_experts, (n, 4, 2)).astype(routing.dtype) for place, n in ROWS}
    data = encode_routed(routed, ROWS, routing)
    assert len(data) == 4 * 4 * 2 * width
    back = decode_routed(data, ROWS, routing)
    assert back.keys() == routed.keys()
    for place, ids in routed.items():
        np.testing.assert_array_equal(back[place], ids)


def test_the_bytes_are_rows_of_tokens_of_layers() -> None:
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
def test_other_lengths_are_refused(n_bytes: int) -> None:
    """Four tokens, of two layers at most with two experts each: 8 bytes a layer."""
    with pytest.raises(BadFrame, match=f"the experts of 4 tokens have {n_bytes} bytes; they need 8 for each"):
        decode_routed(bytes(n_bytes), ROWS, Routing(2, 2, 8))


def test_an_expert_that_there_is_not_is_refused() -> None:
    with pytest.raises(BadFrame, match="an expert is 8; there are 0 to 7"):
        decode_routed(bytes([0, 8]), [(0, 1)], Routing(1, 2, 8))


def test_the_stages_layers_are_joined_in_order() -> None:
    def stage(*layers: int) -> dict[int, np.ndarray]:
        return {0: np.array(layers, np.uint8).reshape(1, -1, 1)}

    rows, routing = [(0, 1)], Routing(3, 1, 8)
    joined = join_stages([stage(4), stage(), stage(5, 6)], rows, routing)
    assert joined[0].ravel().tolist() == [4, 5, 6]
    with pytest.raises(BadFrame, match="the stages told of 2 layers with experts; there are 3"):
        join_stages([stage(4), stage(5)], rows, routing)


def test_the_rows_that_ask_are_expected_with_all_their_tokens() -> None:
    prompt = {**ONE, "initiation": True, "kv_length": 4, "token_ids": [1, 2, 3, 4], "n_prompt": 4}
    message = message_of([{**prompt, "flags": ROUTED}, ONE, {**ONE, "flags": ROUTED}])
    assert expected_records(message).routed == ((0, 4), (2, 1))
    assert expected_records(message_of([ONE])).routed == ()
