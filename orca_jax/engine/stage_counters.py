"""What the engine master counts of workers in processes of their own; for metrics and benchmarks."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_TIMES = 4096  # of a stage, in memory


@dataclass(slots=True)
class RemoteCounters:
    """What came and was not as it should be, and what went out; for metrics."""

    stale: int = 0  # of an epoch before
    duplicates: int = 0
    rubbish: int = 0
    message_bytes: int = 0  # of all control messages, with their frames
    messages: int = 0
    word_bytes: int = 0  # of what constrained rows allow, sent beside them


class IterationTimes(NamedTuple):
    """When a stage took an iteration's message and when its device was done, in seconds of its own clock.

    `received` is nan where that was not heard of, `done` where the stage is the last: it returns tokens.
    """

    epoch: int
    iteration: int
    stage: int
    received: float
    done: float


@dataclass(slots=True)
class StageCounters:
    """What a stage said of the iterations that it ran; `times` has the newest, oldest first."""

    link_bytes: int = 0  # put on the link to the next stage
    received: int = 0  # iterations that it took
    done: int = 0  # that it said it was done with; the last stage returns tokens instead
    times: deque[IterationTimes] = field(default_factory=lambda: deque[IterationTimes](maxlen=MAX_TIMES))
