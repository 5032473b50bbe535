"""Counts the fields and the numbers of a protobuf message before it is parsed, to bound the cost of parsing.

The parser holds the GIL until it is done. A field costs it far more than the two bytes that it may take in
the message, and a list of four million numbers holds it for tens of milliseconds.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

MAX_FIELDS = 16_384  # logit_bias has up to 4,096 entries; packed token ids are one field
MAX_NUMBERS = 1_000_000  # of one list, as over HTTP

_VARINT, _EIGHT_BYTES, _LENGTH, _GROUP, _END_GROUP, _FOUR_BYTES = range(6)
_LIST_HEAD = 2  # the last bytes of the tag and of the length of a list in a message of its own


def has_too_many_fields(kind: Any, data: bytes) -> bool:
    """Whether a message of type `kind` has more than MAX_FIELDS fields, including those of nested messages.

    The elements of a packed list of numbers do not count. In malformed data only the fields before the first
    fault count.
    """
    return any(n > MAX_FIELDS for n, _ in enumerate(_fields(kind, data), 1))


def has_too_long_list(kind: Any, data: bytes) -> bool:
    """Whether a packed list of integers in a message of type `kind` has more than MAX_NUMBERS elements."""
    for numbers in _fields(kind, data):
        if len(numbers) > MAX_NUMBERS:
            # Each number has one last byte, which is below 128.
            n = np.count_nonzero(np.frombuffer(numbers, np.uint8) < 128)
            if n > MAX_NUMBERS + _LIST_HEAD:
                return True
    return False


def _fields(kind: Any, data: bytes) -> Iterator[memoryview]:
    """Yield once for each field: the bytes of its numbers, or nothing if it is no list of numbers.

    Malformed data ends at its first fault.
    """
    nothing, whole = memoryview(b""), memoryview(data)
    todo = [(kind, 0, len(data))]
    while todo:
        kind, offset, end = todo.pop()
        try:
            while offset < end:
                tag, offset = _varint(data, offset)
                wire_type = tag & 7
                numbers = nothing
                if wire_type == _VARINT:
                    _, offset = _varint(data, offset)
                elif wire_type == _LENGTH:
                    length, offset = _varint(data, offset)
                    inner = _nested_type(kind, tag >> 3)
                    if inner is not None:
                        todo.append((inner, offset, min(offset + length, end)))
                    elif not _is_text(kind, tag >> 3):
                        numbers = whole[offset : min(offset + length, end)]
                    offset += length
                else:
                    offset += {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(wire_type, 0)
                yield numbers
        except IndexError:  # the data ends in the middle of a number
            yield nothing


def _is_text(kind: Any, number: int) -> bool:
    field = kind.fields_by_number.get(number)
    return field is None or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def _nested_type(kind: Any, number: int) -> Any:
    """The type of a field that holds messages; None for other fields, and for messages of numbers only."""
    field = kind.fields_by_number.get(number)
    if field is None or field.message_type is None:
        return None
    inner = field.message_type
    has_more_than_numbers = any(
        each.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE) for each in inner.fields
    )
    return inner if has_more_than_numbers else None


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """The number that begins at `offset`, and the offset after it."""
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, offset
        shift += 7
        if shift > 63:
            return value, offset
