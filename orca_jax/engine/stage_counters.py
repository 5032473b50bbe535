"""The engine master's counters of worker processes, for metrics and benchmarks."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_TIMES = 4096  # iterations whose times are kept, per stage


@dataclass(slots=True)
class RemoteCounters:
    """Frames that were late, repeated or malformed, and bytes sent."""

    stale: int = 0  # from an earlier epoch
    duplicates: int = 0
    malformed: int = 0
    message_bytes: int = 0  # all control messages, with their frames
    messages: int = 0
    word_bytes: int = 0  # masks of the tokens that constrained rows allow


class IterationTimes(NamedTuple):
    """When a stage took an iteration's message and when its device finished, in seconds on the stage's clock.

    `received` is NaN if its report was lost. `done` is NaN for the last stage, which returns tokens instead.
    """

    epoch: int
    iteration: int
    stage: int
    received: float
    done: float


@dataclass(slots=True)
class StageCounters:
    """A stage's reports about its iterations; `times` has the latest ones, oldest first.

    `received_at` has the times of this epoch's iterations that were received and are not done.
    """

    link_bytes: int = 0  # put on the link to the next stage
    received: int = 0  # iterations
    done: int = 0  # iterations; the last stage returns tokens instead
    times: deque[IterationTimes] = field(default_factory=lambda: deque[IterationTimes](maxlen=MAX_TIMES))
    received_at: dict[int, float] = field(default_factory=dict[int, float])

    def note_received(self, iteration: int, seconds: float) -> None:
        """Note that the stage received an iteration, at this time of its clock."""
        self.received += 1
        self.received_at[iteration] = seconds
        if len(self.received_at) > MAX_TIMES:  # a worker that reports no DONE although tokens return
            del self.received_at[next(iter(self.received_at))]

    def note_times(self, epoch: int, iteration: int, stage: int, *, done: float) -> None:
        """Note that an iteration has ended here; `done` is as in IterationTimes."""
        received = self.received_at.pop(iteration, math.nan)
        self.times.append(IterationTimes(epoch, iteration, stage, received, done))
