"""How many fields a message of generation.proto has, found before it is parsed.

The parser holds the interpreter until it is done. It takes a megabyte of token ids or text in milliseconds,
but fields cost it much more than the two bytes that each may come in.
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

MAX_FIELDS = 16_384  # those of logit_bias are 4,096; packed token ids are one

_VARINT, _EIGHT_BYTES, _LENGTH, _GROUP, _END_GROUP, _FOUR_BYTES = range(6)


def has_too_many_fields(kind: Any, data: bytes) -> bool:
    """Whether a message of `kind` has more than MAX_FIELDS, with those of the messages in it; numbers in a
    list are none. What is no message at all has as many as come before its first fault.
    """
    n = 0
    todo = [(kind, 0, len(data))]
    while todo:
        kind, at, end = todo.pop()
        try:
            while at < end:
                n += 1
                if n > MAX_FIELDS:
                    return True
                tag, at = _varint(data, at)
                wire_type = tag & 7
                if wire_type == _VARINT:
                    _, at = _varint(data, at)
                elif wire_type == _LENGTH:
                    length, at = _varint(data, at)
                    inner = _messages(kind, tag >> 3)
                    if inner is not None:
                        todo.append((inner, at, min(at + length, end)))
                    at += length
                else:
                    at += {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(wire_type, 0)
        except IndexError:  # it ends in the middle of a number
            pass
    return False


def _messages(kind: Any, number: int) -> Any:
    """The kind of message that the field is, unless that has but numbers; None for any other field."""
    field = kind.fields_by_number.get(number)
    if field is None or field.message_type is None:
        return None
    inner = field.message_type
    texts = any(
        each.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE) for each in inner.fields
    )
    return inner if texts else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            return value, at
