"""Frames as bytes: nothing is lost, damage is found, and a peer of an older wire is refused by version."""

import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.control import frame as frame_module
from orca_jax.control import worker_pb2
from orca_jax.control.frame import (
    FRAME_BYTES,
    PROTOCOL_VERSION,
    START,
    TOKENS,
    WORDS,
    Frame,
    FrameKind,
    StageTime,
    decode_frame,
    decode_stage_time,
    encode_frame,
    encode_stage_time,
)
from orca_jax.control.handshake import JOINED
from orca_jax.errors import BadFrame

payloads: dict[FrameKind, st.SearchStrategy[Any]] = {
    FrameKind.START: st.builds(worker_pb2.Start, next_address=st.text(max_size=20)),
    FrameKind.MESSAGE: st.builds(worker_pb2.Iteration, integers=st.binary(max_size=64)),
    FrameKind.READY: st.none(),
    FrameKind.RECEIVED: st.builds(worker_pb2.StageTime, seconds=st.floats(0, 1e9)),
    FrameKind.DONE: st.builds(worker_pb2.StageTime, link_bytes=st.integers(0, 2**64 - 1)),
    FrameKind.TOKENS: st.builds(worker_pb2.Tokens, token_ids=st.binary(max_size=64)),
    FrameKind.TROUBLE: st.text(max_size=64),
    FrameKind.WORDS: st.binary(max_size=64),
    FrameKind.PASSED: st.none(),
}


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(FrameKind))
    return Frame(
        kind,
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, 2**32 - 1)),
        draw(payloads[kind]),
    )


FRAME = Frame(TOKENS, 3, 5, 1, worker_pb2.Tokens(token_ids=b"abcd"))


@given(frames())
def test_a_frame_comes_back_as_it_was(frame: Frame):
    data = encode_frame(frame)
    back = decode_frame(data)
    assert back == frame
    assert size_of(frame.payload) < len(data) <= size_of(frame.payload) + FRAME_BYTES


def size_of(payload: Any) -> int:
    """The bytes of a frame that has only this field."""
    if payload is None:
        return 0
    if isinstance(payload, str | bytes):
        return len(payload.encode() if isinstance(payload, str) else payload)
    return payload.ByteSize()


@given(st.binary(max_size=100))
def test_garbage_is_not_a_frame(data: bytes):
    with pytest.raises(BadFrame):
        decode_frame(data)


@given(frames(), st.integers(0, 10_000), st.integers(1, 255))
def test_one_damaged_byte_is_found(frame: Frame, place: int, flip: int):
    data = bytearray(encode_frame(frame))
    data[place % len(data)] ^= flip
    with pytest.raises(BadFrame):
        decode_frame(bytes(data))


@given(frames(), st.integers(0, 200))
def test_a_frame_that_is_cut_or_too_long_is_found(frame: Frame, n: int):
    data = encode_frame(frame) + b"more"
    if n % len(data) != len(data) - 4:
        with pytest.raises(BadFrame):
            decode_frame(data[: n % len(data)])


def test_a_frame_is_one_protobuf_message_with_a_checksum_over_another():
    whole = worker_pb2.Frame.FromString(encode_frame(FRAME))
    assert whole.version == PROTOCOL_VERSION
    assert whole.checksum == zlib.crc32(whole.body)
    expected = worker_pb2.Body(epoch=3, iteration=5, stage=1, tokens=worker_pb2.Tokens(token_ids=b"abcd"))
    assert worker_pb2.Body.FromString(whole.body) == expected


def with_body(data: bytes, **fields: Any) -> bytes:
    """A frame of this body with a valid checksum."""
    fields = {"version": PROTOCOL_VERSION, "checksum": zlib.crc32(data), "body": data, **fields}
    return worker_pb2.Frame(**fields).SerializeToString()


BODY = worker_pb2.Body(epoch=3, ready=worker_pb2.Nothing()).SerializeToString()
UNKNOWN = b"\xa2\x1f\x01x"  # field 500


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not a frame of orca_jax"),
        (JOINED, "not a frame of orca_jax"),
        (b"GET / HTTP/1.1\r\n", "not a frame of orca_jax"),
        (worker_pb2.Frame(up_to_version_4=b"abcdefgh").SerializeToString(), "not a frame of orca_jax"),
        (worker_pb2.Frame(up_to_version_4=b"\xa1").SerializeToString(), "not a frame of orca_jax"),
        (with_body(BODY, version=0), "not a frame of orca_jax"),
        (with_body(BODY, version=12), "has protocol version 12, and this side uses 11"),
        (with_body(BODY, version=12) + UNKNOWN, "has protocol version 12, and this side uses 11"),
        (with_body(BODY) + UNKNOWN, "unknown or repeated fields"),
        (with_body(BODY) + with_body(BODY), "unknown or repeated fields"),
        (with_body(BODY + UNKNOWN), "body of a frame: they hold unknown"),
        (with_body(BODY + BODY), "body of a frame: they hold unknown"),
        (with_body(b"\xff\xff"), "not the body of a frame"),
        (with_body(b""), "of an unknown kind"),
        (with_body(worker_pb2.Body(epoch=3).SerializeToString()), "of an unknown kind"),
        (with_body(worker_pb2.Body(epoch=3).SerializeToString() + UNKNOWN), "unknown or repeated fields"),
        (with_body(b"R\x02\xff\xff"), "not the body of a frame"),  # trouble that is not UTF-8
        (with_body(BODY, checksum=1), "corrupt: its checksum does not match"),
    ],
)
def test_a_complete_frame_can_still_be_foreign(data: bytes, complaint: str):
    with pytest.raises(BadFrame, match=complaint):
        decode_frame(data)


# What version 4 sent: the field 1 of a Frame, with a header of magic, version, kind, stage, 0, epoch,
# iteration, length and checksum, then the payload. READY of epoch 7 from stage 1; in iteration 9 tokens 5, 6.
VERSION_4 = [
    bytes.fromhex("0a20 a10c0403 0100 0000 0700000000000000 0000000000000000 00000000 22f95fb1"),
    bytes.fromhex(
        "0a28 a10c0406 0000 0000 0700000000000000 0900000000000000 08000000 e9423170 05000000 06000000"
    ),
]


@pytest.mark.parametrize("data", VERSION_4)
def test_a_peer_of_the_wire_before_is_refused_by_version(data: bytes):
    message = (
        "the frame has protocol version 4, and this side uses 11; run the same version of orca_jax everywhere"
    )
    with pytest.raises(BadFrame, match=message):
        decode_frame(data)


def test_a_frame_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch):
    data = encode_frame(Frame(WORDS, 1, 0, 0, bytes(1000)))
    monkeypatch.setattr(frame_module, "MAX_FRAME", len(data))
    assert decode_frame(data).payload == bytes(1000)
    monkeypatch.setattr(frame_module, "MAX_FRAME", len(data) - 1)
    complaint = rf"^a frame of .* has {len(data)} bytes; up to {len(data) - 1} are allowed$"
    with pytest.raises(BadFrame, match=complaint):
        decode_frame(data)


def test_every_kind_of_frame_has_its_field():
    fields = worker_pb2.Body.DESCRIPTOR.oneofs_by_name["kind"].fields
    assert {field.name.upper() for field in fields} == {kind.name for kind in FrameKind}


def test_the_master_sends_as_stage_0():
    back = decode_frame(encode_frame(Frame(START, 9)))
    assert back == Frame(START, 9, 0, 0, worker_pb2.Start())


def test_a_stage_s_time_comes_back_as_it_was():
    time = StageTime(12.25, 2**64 - 1)
    assert encode_stage_time(time) == worker_pb2.StageTime(seconds=12.25, link_bytes=2**64 - 1)
    assert decode_stage_time(encode_stage_time(time)) == time
    assert decode_stage_time(encode_stage_time(StageTime(0.0, 0))) == StageTime(0.0, 0)


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (worker_pb2.StageTime(), "has no seconds"),
        (worker_pb2.StageTime(link_bytes=5), "has no seconds"),
        (worker_pb2.StageTime(seconds=float("nan")), "nan seconds"),
        (worker_pb2.StageTime(seconds=float("inf")), "inf seconds"),
        (worker_pb2.StageTime(seconds=-0.5), "-0.5 seconds"),
    ],
)
def test_a_stage_s_time_that_cannot_be_is_refused(payload: worker_pb2.StageTime, complaint: str):
    with pytest.raises(BadFrame, match=complaint):
        decode_stage_time(payload)
