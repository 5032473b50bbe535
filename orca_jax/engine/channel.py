"""The engine master's lines to its workers, as it sees them: grpc_channel.py has the real ones."""

from typing import NamedTuple, Protocol


class Arrival(NamedTuple):
    """What came over the line of a stage: a frame's bytes, or None and why the line broke."""

    stage: int
    data: bytes | None
    why: str = ""


class Channel(Protocol):
    """The engine master's lines, one to each worker; they may lose, double, delay and damage frames."""

    def send(self, stage: int, data: bytes) -> None:
        """Send a frame without waiting. What cannot be sent is dropped; a broken line is an arrival."""
        ...

    def receive(self, timeout: float) -> Arrival | None:
        """The next that came over any line; None when nothing has within `timeout` seconds."""
        ...

    def close(self) -> None:
        """End all lines."""
        ...
