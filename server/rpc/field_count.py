"""Counts the fields of a protobuf message before it is parsed, to bound the cost of parsing.

The parser holds the GIL until it is done. It parses a megabyte of token ids or text in milliseconds, but a
field costs it far more than the two bytes that a field may take in the message.
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

MAX_FIELDS = 16_384  # logit_bias has up to 4,096 entries; packed token ids are one field

_VARINT, _EIGHT_BYTES, _LENGTH, _GROUP, _END_GROUP, _FOUR_BYTES = range(6)


def has_too_many_fields(kind: Any, data: bytes) -> bool:
    """Whether a message of type `kind` has more than MAX_FIELDS fields, including those of nested messages.

    The elements of a packed list of numbers do not count. In malformed data only the fields before the first
    fault count.
    """
    n = 0
    todo = [(kind, 0, len(data))]
    while todo:
        kind, offset, end = todo.pop()
        try:
            while offset < end:
                n += 1
                if n > MAX_FIELDS:
                    return True
                tag, offset = _varint(data, offset)
                wire_type = tag & 7
                if wire_type == _VARINT:
                    _, offset = _varint(data, offset)
                elif wire_type == _LENGTH:
                    length, offset = _varint(data, offset)
                    inner = _nested_type(kind, tag >> 3)
                    if inner is not None:
                        todo.append((inner, offset, min(offset + length, end)))
                    offset += length
                else:
                    offset += {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(wire_type, 0)
        except IndexError:  # the data ends in the middle of a number
            pass
    return False


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
