"""Start orders as payloads: nothing is lost, and anything else is refused."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.control import worker_pb2
from orca_jax.control.frame import START, Frame, decode_frame, encode_frame, parsed
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
EXPERTS = ("sparse_layers", "top_k", "n_experts")
ADAPTERS = {
    **{"max_adapters": 3, "adapter_rank": 16},
    **{f"adapted_{extra}": True for extra in ("embedding", "head", "experts")},
}
FIELDS = {"next_address": "10.0.0.7:9001", "worker_seconds": 30.0, "ready_seconds": 300.5}


def start(sizes: dict[str, Any] | None = None, **changed: Any) -> worker_pb2.Start:
    return worker_pb2.Start(shape=worker_pb2.Shape(**{**SIZES, **(sizes or {})}), **{**FIELDS, **changed})


def there_and_back(order: StartOrder) -> StartOrder:
    return decode_start(decode_frame(encode_frame(Frame(START, 1, payload=encode_start(order)))).payload)


def test_an_order_is_its_fields():
    assert encode_start(ORDER) == start()
    other = replace(ORDER, shape=replace(SHAPE, deterministic=True, coarse_buckets=True))
    assert encode_start(other) == start({"deterministic": True, "coarse_buckets": True})
    weights = {"weights_version": 3, "weights_directory": "/w", "sleep_level": 2}
    adapters = {"adapters_version": 4, "adapters_directory": "/a"}
    for changed in (weights, adapters, weights | adapters):
        assert encode_start(replace(ORDER, **changed)) == start(None, **changed)
        assert there_and_back(replace(ORDER, **changed)) == replace(ORDER, **changed)


@pytest.mark.parametrize("address", ["", "unix:/a/b.sock", "[::1]:80", "\u00fc" * 1000, "\U0001f600" * 1000])
def test_an_order_comes_back_as_it_was(address: str):
    order = replace(ORDER, next_address=address)
    assert there_and_back(order) == order


def test_the_room_for_adapters_comes_back():
    order = replace(ORDER, shape=replace(SHAPE, **ADAPTERS))
    assert there_and_back(order) == order


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
    assert there_and_back(replace(ORDER, shape=shape)).shape == shape


@pytest.mark.parametrize(
    "payload",
    [
        worker_pb2.Start(),
        worker_pb2.Start(**FIELDS),
        *(start({name: value}) for name in SIZES for value in (0, (1 << 31) + 1, (1 << 32) - 1)),
        *(start(next_address=address) for address in ("a" * 1001, "a\0b", "a\nb")),
        *(
            start(None, **{name: value})
            for name in ("worker_seconds", "ready_seconds")
            for value in (0, -1.0, float("nan"), float("inf"))
        ),
        start(sleep_level=3),
        *(
            start(None, **{f"{kind}_version": version, f"{kind}_directory": directory})
            for kind in ("weights", "adapters")
            for version, directory in ((1, ""), (0, "/a"), (1, "a\0b"), (1, "a" * 4097))
        ),
    ],
)
def test_a_malformed_order_is_refused(payload: worker_pb2.Start):
    assert decode_start(start()) == ORDER
    with pytest.raises(BadFrame, match="a start order's"):
        decode_start(payload)


@pytest.mark.parametrize("field", [*SIZES, *FIELDS])
def test_a_field_that_does_not_come_is_refused_but_for_the_address(field: str):
    payload = start()
    (payload.shape if field in SIZES else payload).ClearField(field)  # pyright: ignore[reportArgumentType]
    if field == "next_address":
        assert decode_start(payload) == replace(ORDER, next_address="")
    else:
        with pytest.raises(BadFrame, match=f"a start order's {field} is 0"):
            decode_start(payload)


def test_the_complaint_names_the_field():
    with pytest.raises(BadFrame, match="n_rows is 0; it must be a whole number from 1 to 4194304"):
        decode_start(start({"n_rows": 0}))
    with pytest.raises(BadFrame, match=r"ready_seconds is -1\.0; it must be finite seconds above 0"):
        decode_start(start(ready_seconds=-1))


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_order_is_refused_or_is_an_order(place: int, value: int):
    data = bytearray(encode_start(ORDER).SerializeToString())
    data[place % len(data)] = value
    try:
        payload = parsed(worker_pb2.Start, bytes(data), 1000, "a start order")
        back = decode_start(payload)
    except BadFrame:
        return
    assert decode_start(encode_start(back)) == back


def test_the_order_has_every_size_of_an_engine():
    names = {field.name for field in fields(EngineShape)}
    assert names == {
        *SIZES,
        "deterministic",
        "coarse_buckets",
        "max_encoder_blocks",
        "embedding_size",
        "states",
        "n_snapshots",
        "n_draft_states",
        "max_drafts",
        "n_host_blocks",
        "n_host_states",
        "drafts",
        *EXPERTS,
        *ADAPTERS,
    }
    assert names == set(worker_pb2.Shape.DESCRIPTOR.fields_by_name)
