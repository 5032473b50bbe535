import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.control.frame import (
    HEADER_BYTES,
    PROTOCOL_VERSION,
    START,
    TOKENS,
    Frame,
    FrameKind,
    StageTime,
    decode_frame,
    decode_stage_time,
    encode_frame,
    encode_stage_time,
)
from orca_jax.errors import BadFrame

frames = st.builds(
    Frame,
    st.sampled_from(FrameKind),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**16 - 1),
    st.binary(max_size=64),
)
FRAME = Frame(TOKENS, 3, 5, 1, b"abcd")


@given(frames)
def test_a_frame_comes_back_as_it_was(frame: Frame):
    data = encode_frame(frame)
    assert len(data) == HEADER_BYTES + len(frame.payload)
    assert decode_frame(data) == frame


@given(st.binary(max_size=100))
def test_rubbish_is_no_frame(data: bytes):
    with pytest.raises(BadFrame):
        decode_frame(data)


@given(frames, st.integers(0, 10_000), st.integers(1, 255))
def test_one_damaged_byte_is_found(frame: Frame, place: int, flip: int):
    data = bytearray(encode_frame(frame))
    data[place % len(data)] ^= flip
    with pytest.raises(BadFrame):
        decode_frame(bytes(data))


@given(frames, st.integers(0, 200))
def test_a_frame_that_is_cut_or_too_long_is_found(frame: Frame, n: int):
    data = encode_frame(frame) + b"more"
    if n % len(data) != len(data) - 4:
        with pytest.raises(BadFrame):
            decode_frame(data[: n % len(data)])


def with_checksum(data: bytearray) -> bytes:
    at = HEADER_BYTES - 4
    data[at:HEADER_BYTES] = zlib.crc32(data[HEADER_BYTES:], zlib.crc32(data[:at])).to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (0, 0, "no frame of orca_jax"),
        (2, PROTOCOL_VERSION + 1, f"version {PROTOCOL_VERSION + 1}, and this side speaks {PROTOCOL_VERSION}"),
        (3, 0, "kind 0"),
        (3, 99, "kind 99"),
        (6, 1, "not known"),
        (24, 5, "5 bytes of payload, and 4 came"),
    ],
)
def test_a_whole_frame_may_still_be_none_of_ours(place: int, value: int, complaint: str):
    data = bytearray(encode_frame(FRAME))
    assert decode_frame(with_checksum(data)) == FRAME
    data[place] = value
    with pytest.raises(BadFrame, match=complaint):
        decode_frame(with_checksum(data))


def test_the_master_sends_as_stage_0():
    assert decode_frame(encode_frame(Frame(START, 9))) == Frame(START, 9, 0, 0, b"")


def test_a_stage_s_time_comes_back_as_it_was():
    time = StageTime(12.25, 2**64 - 1)
    assert encode_stage_time(time) == struct.pack("<dQ", 12.25, 2**64 - 1)
    assert decode_stage_time(encode_stage_time(time)) == time


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"", "0 bytes of a stage's time"),
        (bytes(15), "15 bytes"),
        (bytes(17), "17 bytes"),
        (struct.pack("<dQ", float("nan"), 0), "nan seconds"),
        (struct.pack("<dQ", float("inf"), 0), "inf seconds"),
        (struct.pack("<dQ", -0.5, 0), "-0.5 seconds"),
    ],
)
def test_a_stage_s_time_that_cannot_be_is_refused(payload: bytes, complaint: str):
    with pytest.raises(BadFrame, match=complaint):
        decode_stage_time(payload)
