"""Draws protobuf messages as bytes, from their descriptors: any values, and malformed encodings.

A message is a valid beginning with fields added: the last value of a field counts, so that most messages are
read and many run.
"""

import struct
from collections.abc import Callable, Sequence

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

VARINT, EIGHT_BYTES, LENGTH, GROUP, END_GROUP, FOUR_BYTES = range(6)

_TEXTS = (
    *("", "a", "In the beginning", "order-17", "true", "[a-z]+", '{"type": "integer"}'),
    *("é" * 50, "x" * 2000),
)
_WHOLE = (
    *(0, 1, 2, -1, 4, 16, 64, 259, 1 << 31, (1 << 31) - 1, -(1 << 31)),
    *((1 << 63) - 1, -(1 << 63), (1 << 64) - 1),
)
_REAL = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-10, 5e-324, 100.0, 1e308, float("inf"), float("-inf"), float("nan"))
_HUGE = (1_000, 17_000, 100_000)
_LARGEST = 5 << 20  # bytes of one entry's repetitions: more than a server takes
_DEEPEST = 4

texts = st.sampled_from(_TEXTS) | st.text(max_size=20)
whole = st.sampled_from(_WHOLE) | st.integers(-(1 << 63), (1 << 64) - 1)
real = st.sampled_from(_REAL) | st.floats()


def varint(value: int) -> bytes:
    """A whole number of 64 bits, negative ones in two's complement."""
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def of_length(data: bytes) -> bytes:
    return varint(len(data)) + data


def entry(number: int, wire_type: int, payload: bytes) -> bytes:
    """An encoded field of a message."""
    return varint(number << 3 | wire_type) + payload


def values(field: FieldDescriptor, depth: int) -> tuple[int, SearchStrategy[bytes]]:
    """The wire type of one value of the field, and what stands for it."""
    kind = field.type
    if kind in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return LENGTH, (texts.map(str.encode) | st.binary(max_size=20)).map(of_length)
    if field.message_type is not None:
        return LENGTH, fields(field.message_type, depth + 1).map(of_length)
    if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64):
        return EIGHT_BYTES, real.map(lambda value: struct.pack("<d", value))
    if kind in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32):
        return FOUR_BYTES, st.binary(min_size=4, max_size=4)
    return VARINT, whole.map(varint)


def fields(kind: Descriptor, depth: int = 0, most: int = 3) -> SearchStrategy[bytes]:
    """Up to `most` entries of a message, well-formed or not."""
    known = list(kind.fields)
    if not known or depth > _DEEPEST:
        return st.just(b"")

    @st.composite
    def some(draw: DrawFn) -> bytes:
        found = list[bytes]()
        for _ in range(draw(st.integers(0, most))):
            field = draw(st.sampled_from(known))
            wire_type, one = values(field, depth)
            how = draw(st.sampled_from(("one",) * 8 + ("many", "wrong type", "unknown", "packed")))
            if how == "one":
                found.append(entry(field.number, wire_type, draw(one)))
            elif how == "many":
                repeated = entry(field.number, wire_type, draw(one))
                n = min(draw(st.sampled_from(_HUGE)), _LARGEST // len(repeated))
                found.append(repeated * n)
            elif how == "packed":
                found.append(entry(field.number, LENGTH, of_length(b"\x07" * draw(st.sampled_from(_HUGE)))))
            elif how == "unknown":
                number = draw(st.sampled_from((15, 99, 19_000, (1 << 29) - 1)))
                found.append(entry(number, wire_type, draw(one)))
            else:
                found.append(entry(field.number, draw(st.integers(0, 7)), draw(st.binary(max_size=12))))
        return b"".join(found)

    return some()


def _cut(draw: DrawFn, data: bytes) -> bytes:
    return data[: draw(st.integers(0, len(data)))]


def _changed(draw: DrawFn, data: bytes) -> bytes:
    if not data:
        return b"\xff"
    place = draw(st.integers(0, len(data) - 1))
    return data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]


def _longer_than_itself(draw: DrawFn, data: bytes) -> bytes:
    return data + entry(draw(st.integers(1, 7)), LENGTH, varint(draw(st.sampled_from((1, 1 << 20, 1 << 40)))))


def _in_groups(draw: DrawFn, data: bytes) -> bytes:
    n = draw(st.sampled_from((1, 99, 20_000)))
    return data + entry(1, GROUP, b"") * n + entry(1, END_GROUP, b"") * draw(st.sampled_from((0, n)))


def _endless_number(draw: DrawFn, data: bytes) -> bytes:
    return data + b"\x80" * draw(st.sampled_from((9, 10, 11, 1000)))


def _nested(draw: DrawFn, data: bytes) -> bytes:
    for _ in range(draw(st.sampled_from((50, 200)))):
        data = entry(draw(st.integers(2, 5)), LENGTH, of_length(data))
    return data


_FAULTS: tuple[Callable[[DrawFn, bytes], bytes], ...] = (
    *(_cut, _changed, _longer_than_itself, _in_groups, _endless_number, _nested),
)


@st.composite
def messages(draw: DrawFn, kind: Descriptor, beginnings: Sequence[bytes]) -> bytes:
    """A message that begins as one of `beginnings`, which are valid; a quarter are broken."""
    data = draw(st.sampled_from([*beginnings])) + draw(fields(kind))
    if draw(st.integers(0, 3)) == 0:
        data = draw(st.sampled_from(_FAULTS))(draw, data)
    return data
