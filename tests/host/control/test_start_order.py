"""Start orders as bytes: nothing is lost, and rubbish is told from them."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.control.start_order import StartOrder, decode_start, encode_start
from orca_jax.errors import BadFrame
from orca_jax.iteration.shape import EngineShape

SHAPE = EngineShape(
    block_size=16, max_blocks=4, max_rows=8, max_tokens=64, n_rows=9, n_blocks=32, vocab_size=100
)
ORDER = StartOrder(shape=SHAPE, next_address="10.0.0.7:9001", worker_seconds=30.0, ready_seconds=300.5)
SIZES = {
    "block_size": 16,
    "max_blocks": 4,
    "max_rows": 8,
    "max_tokens": 64,
    "n_rows": 9,
    "n_blocks": 32,
    "vocab_size": 100,
}
SAID = {**SIZES, "deterministic": False, "coarse_buckets": False}
FIELDS = {"shape": SAID, "next_address": "10.0.0.7:9001", "worker_seconds": 30.0, "ready_seconds": 300.5}


def test_an_order_is_compact_json():
    assert encode_start(ORDER) == json.dumps(FIELDS, separators=(",", ":")).encode()


@pytest.mark.parametrize("address", ["", "unix:/a/b.sock", "[::1]:80", "ü" * 1000, "\U0001f600" * 1000])
def test_an_order_comes_back_as_it_was(address: str):
    order = replace(ORDER, next_address=address)
    assert decode_start(encode_start(order)) == order


def test_the_largest_engine_fits():
    shape = EngineShape(
        block_size=1 << 10,
        max_blocks=1 << 21,
        max_rows=1 << 12,
        max_tokens=1 << 20,
        n_rows=1 << 22,
        n_blocks=1 << 31,
        vocab_size=1 << 22,
        deterministic=True,
        coarse_buckets=True,
    )
    assert decode_start(encode_start(replace(ORDER, shape=shape))).shape == shape


def test_whole_seconds_are_seconds():
    back = decode_start(json.dumps({**FIELDS, "worker_seconds": 30}).encode())
    assert back == ORDER and type(back.worker_seconds) is float


def with_size(name: str, value: Any) -> dict[str, Any]:
    return {**FIELDS, "shape": {**SAID, name: value}}


def without(found: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != name}


@pytest.mark.parametrize(
    "found",
    [
        [],
        None,
        7,
        "shape",
        {},
        {**FIELDS, "more": 1},
        with_size("more", 1),
        *(without(FIELDS, name) for name in FIELDS),
        *({**FIELDS, "shape": without(SAID, name)} for name in SAID),
        *(
            with_size(name, value)
            for name in ("deterministic", "coarse_buckets")
            for value in (0, 1, None, "true")
        ),
        *({**FIELDS, "shape": shape} for shape in (None, [], 5, "x")),
        *(with_size(name, value) for name in SIZES for value in (True, 0, -1, 1.0, "1", None, [1])),
        *(with_size(name, (1 << 31) + 1) for name in SIZES),
        *({**FIELDS, "next_address": address} for address in (None, 5, ["a"], "a" * 1001, "a\0b", "\ud800")),
        *(
            {**FIELDS, name: value}
            for name in ("worker_seconds", "ready_seconds")
            for value in (True, 0, 0.0, -1.0, None, "3", [3], float("nan"), float("inf"), 10**400)
        ),
    ],
)
def test_what_is_no_order_is_refused(found: Any):
    with pytest.raises(BadFrame):
        decode_start(json.dumps(found).encode())


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"\xff\xfe", b"[" * 5000, b'{"shape":', b" " * (1 << 20), b"9" * 5000]
)
def test_what_is_not_json_is_refused(payload: bytes):
    with pytest.raises(BadFrame):
        decode_start(payload)


def test_an_order_that_is_too_long_is_not_read():
    padded = b" " * (1 << 20) + encode_start(ORDER)
    with pytest.raises(BadFrame, match="up to 16384 are allowed"):
        decode_start(padded)


def test_the_complaint_names_the_field():
    with pytest.raises(BadFrame, match="n_rows is 0; it must be a whole number from 1 to 4194304"):
        decode_start(json.dumps(with_size("n_rows", 0)).encode())
    with pytest.raises(BadFrame, match="ready_seconds is 'soon'; it must be seconds above 0"):
        decode_start(json.dumps({**FIELDS, "ready_seconds": "soon"}).encode())


@given(st.binary(max_size=200))
def test_rubbish_is_refused_and_nothing_else_is_raised(payload: bytes):
    with pytest.raises(BadFrame):
        decode_start(payload)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_order_is_refused_or_is_an_order(place: int, value: int):
    payload = bytearray(encode_start(ORDER))
    payload[place % len(payload)] = value
    try:
        back = decode_start(bytes(payload))
    except BadFrame:
        return
    assert decode_start(encode_start(back)) == back


def test_every_size_of_the_engine_is_told():
    assert {field.name for field in fields(EngineShape)} == set(SAID)
