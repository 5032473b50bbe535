"""The engine master's counters of worker processes, for metrics and benchmarks."""

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
    """A stage's reports about its iterations; `times` has the latest ones, oldest first."""

    link_bytes: int = 0  # put on the link to the next stage
    received: int = 0  # iterations
    done: int = 0  # iterations; the last stage returns tokens instead
    times: deque[IterationTimes] = field(default_factory=lambda: deque[IterationTimes](maxlen=MAX_TIMES))
