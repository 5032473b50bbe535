"""The engine master's interface to its control lines; grpc_channel.py implements it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Arrival(NamedTuple):
    """A frame's bytes from a stage's line, or None with the reason why the line broke."""

    stage: int
    data: bytes | None
    why: str = ""


class Channel(Protocol):
    """The engine master's lines, one to each worker; they may lose, duplicate, delay and corrupt frames."""

    def follow(self) -> Sequence[str]:
        """Each stage's worker's control address now; the line to one that has moved joins it there."""
        ...

    def send(self, stage: int, data: bytes) -> None:
        """Send a frame without blocking; drops it if the line is broken, which is also an arrival."""
        ...

    def receive(self, timeout: float) -> Arrival | None:
        """Return the next arrival from any line, or None after `timeout` seconds."""
        ...

    def close(self) -> None:
        """Close all lines."""
        ...
