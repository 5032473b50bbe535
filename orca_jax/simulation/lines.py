"""The lines between a master and simulated workers, on a virtual clock, with damage where it is asked for."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from orca_jax.engine.channel import Arrival
from orca_jax.simulation.engine import VirtualClock

Damage = Literal["drop", "double", "delay", "rubbish"]
_MOST_LOOKS = 200_000  # of the master at its lines; a serving of a few requests takes some thousands


class TakesFrames(Protocol):
    """A stage at the other end."""

    def take(self, data: bytes) -> None:
        """A frame arrives."""
        ...


class SimulatedLines:
    """The lines between master and stages, and from stage to stage; `Channel` for the master.

    `spoil` has the next frame to or from a stage dropped, doubled, delayed or damaged.
    """

    def __init__(self, clock: VirtualClock, *, seconds: float, longest_wait: float) -> None:
        self.clock = clock
        self.stages: Sequence[TakesFrames] = []
        self._seconds = seconds
        self._longest_wait = longest_wait
        self._inbox: deque[Arrival] = deque()
        self._n_looks = 0
        self._spoiled: dict[tuple[int, bool], deque[tuple[Damage, float]]] = {}

    def spoil(self, stage: int, inbound: bool, damage: Damage, seconds: float) -> None:
        """Spoil the next frame to (`inbound`) or from a stage; a delay or a double comes `seconds` late."""
        self._spoiled.setdefault((stage, inbound), deque()).append((damage, seconds))

    def to_stage(self, stage: int, data: bytes) -> None:
        """From whom does not matter."""
        self._carry((stage, True), data, self.stages[stage].take)

    def to_master(self, stage: int, data: bytes) -> None:
        """From a stage."""
        self._carry((stage, False), data, lambda data: self._inbox.append(Arrival(stage, data)))

    def broken(self, stage: int) -> None:
        """The line between the master and a stage breaks."""
        arrival = Arrival(stage, None, "the connection was closed")
        self.clock.call_at(self.clock.now() + self._seconds, lambda: self._inbox.append(arrival))

    def send(self, stage: int, data: bytes) -> None:
        """Channel."""
        self.to_stage(stage, data)

    def receive(self, timeout: float) -> Arrival | None:
        """Channel. Comes back after every event, because it may be an interruption."""
        assert 0 <= timeout <= self._longest_wait, f"a wait of {timeout} seconds"
        self._n_looks += 1
        assert self._n_looks < _MOST_LOOKS, "it waits for ever"
        if not self._inbox and timeout > 0:
            now = self.clock.now()
            end = max(now + timeout, math.nextafter(now, math.inf))
            if self.clock.next_event() <= end:
                self.clock.run_next()
            else:
                self.clock.advance_to(end)
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        """Channel."""
        self._inbox.clear()

    def _carry(self, line: tuple[int, bool], data: bytes, take: Callable[[bytes], object]) -> None:
        at = self.clock.now() + self._seconds
        spoiled = self._spoiled.get(line)
        if spoiled:
            damage, seconds = spoiled.popleft()
            if damage == "drop":
                return
            if damage == "double":
                self.clock.call_at(at + seconds, lambda: take(data))
            elif damage == "delay":
                at += seconds
            else:
                place = len(data) * 7 // 11
                data = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
        self.clock.call_at(at, lambda: take(data))
