"""The lines between a master and simulated workers, on a virtual clock, with damage on request."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from orca_jax.engine.remote_workers import Arrival
from orca_jax.simulation.engine import VirtualClock

Damage = Literal["drop", "duplicate", "delay", "corrupt"]
_MAX_RECEIVES = 200_000  # the master's calls of `receive`; serving a few requests takes some thousands


class TakesFrames(Protocol):
    """A stage at the other end of a line."""

    @property
    def address(self) -> str:
        """The address of the stage's present process."""
        ...

    def take(self, data: bytes) -> None:
        """Handle a frame."""
        ...


class SimulatedLines:
    """The lines between master and stages and between stages; implements `Channel` for the master.

    `damage_next` drops, duplicates, delays or corrupts the next frame to or from a stage.
    """

    def __init__(self, clock: VirtualClock, *, seconds: float, longest_wait: float) -> None:
        self.clock = clock
        self.stages: Sequence[TakesFrames] = []
        self._seconds = seconds
        self._longest_wait = longest_wait
        self._addresses: Sequence[str] = ()  # where the master's lines go
        self._inbox: deque[Arrival] = deque()
        self._n_receives = 0
        self._damages: dict[tuple[int, bool], deque[tuple[Damage, float]]] = {}

    def damage_next(self, stage: int, inbound: bool, damage: Damage, seconds: float) -> None:
        """Damage the next frame to (`inbound`) or from a stage; a delay or duplicate is `seconds` late."""
        self._damages.setdefault((stage, inbound), deque()).append((damage, seconds))

    def to_address(self, stage: int, address: str, data: bytes) -> None:
        """Carry a frame to a stage's process at `address`; it is lost if none is there when it arrives."""
        process = self.stages[stage]

        def arrive(data: bytes) -> None:
            if process.address == address:
                process.take(data)

        self._carry((stage, True), data, arrive)

    def to_master(self, stage: int, data: bytes) -> None:
        """Carry a frame from a stage to the master."""
        self._carry((stage, False), data, lambda data: self._inbox.append(Arrival(stage, data)))

    def broken(self, stage: int) -> None:
        """Break the line between the master and a stage."""
        arrival = Arrival(stage, None, "the connection was closed")
        self.clock.call_at(self.clock.now() + self._seconds, lambda: self._inbox.append(arrival))

    def follow(self) -> Sequence[str]:
        """As in Channel."""
        self._addresses = [stage.address for stage in self.stages]
        return self._addresses

    def send(self, stage: int, data: bytes) -> None:
        """As in Channel."""
        self.to_address(stage, self._addresses[stage], data)

    def receive(self, timeout: float) -> Arrival | None:
        """As in Channel; returns after every event, because it may be an interruption."""
        assert 0 <= timeout <= self._longest_wait, f"a wait of {timeout} seconds"
        self._n_receives += 1
        assert self._n_receives < _MAX_RECEIVES, "the master waits forever"
        if not self._inbox and timeout > 0:
            now = self.clock.now()
            end = max(now + timeout, math.nextafter(now, math.inf))
            if self.clock.next_event() <= end:
                self.clock.run_next()
            else:
                self.clock.advance_to(end)
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        """As in Channel."""
        self._inbox.clear()

    def _carry(self, line: tuple[int, bool], data: bytes, take: Callable[[bytes], object]) -> None:
        at = self.clock.now() + self._seconds
        damages = self._damages.get(line)
        if damages:
            damage, seconds = damages.popleft()
            if damage == "drop":
                return
            if damage == "duplicate":
                self.clock.call_at(at + seconds, lambda: take(data))
            elif damage == "delay":
                at += seconds
            else:
                place = len(data) * 7 // 11
                data = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
        self.clock.call_at(at, lambda: take(data))
