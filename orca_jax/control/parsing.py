"""Bytes that strangers or a broken worker may have sent, to protobuf messages."""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from orca_jax.errors import BadFrame

M = TypeVar("M", bound=Message)


def parsed(kind: type[M], data: bytes, limit: int, what: str) -> M:
    """The message that these bytes are, `limit` at most. Raises BadFrame, which calls it `what`."""
    if len(data) > limit:
        raise BadFrame(f"{len(data)} bytes came for {what}; up to {limit} are allowed")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise BadFrame(f"the bytes are not {what}") from error


def check_exact(message: Message, data: bytes, what: str) -> None:
    """Refuse a message whose bytes held more than its fields: ones it does not have, or the same ones twice.

    Raises BadFrame.
    """
    message.DiscardUnknownFields()
    if message.ByteSize() != len(data):
        raise BadFrame(f"the bytes are not {what}: they hold more than its fields")
