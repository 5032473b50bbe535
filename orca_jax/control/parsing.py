"""Parse protobuf messages from bytes that an untrusted or broken peer may have sent."""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from orca_jax.errors import BadFrame

M = TypeVar("M", bound=Message)


def parsed(kind: type[M], data: bytes, limit: int, what: str) -> M:
    """Parse at most `limit` bytes. Raises BadFrame, whose text calls the message `what`."""
    if len(data) > limit:
        raise BadFrame(f"{what} has {len(data)} bytes; up to {limit} are allowed")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise BadFrame(f"the bytes are not {what}") from error


def check_exact(message: Message, data: bytes, what: str) -> None:
    """Raise BadFrame if the message's bytes hold unknown fields, or the same field twice."""
    message.DiscardUnknownFields()
    if message.ByteSize() != len(data):
        raise BadFrame(f"the bytes are not {what}: they hold unknown or repeated fields")
