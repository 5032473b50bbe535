"""What the engine master counts about workers in other processes, for metrics and benchmarks."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_TIMES = 4096  # of a stage, in memory


@dataclass(slots=True)
class RemoteCounters:
    """Frames that were late, repeated or wrong, and bytes that were sent."""

    stale: int = 0  # of an epoch before
    duplicates: int = 0
    rubbish: int = 0
    message_bytes: int = 0  # of all control messages, with their frames
    messages: int = 0
    word_bytes: int = 0  # of the allowed tokens of constrained rows


class IterationTimes(NamedTuple):
    """When a stage took an iteration's message and when its device was done, in seconds of its own clock.

    `received` is nan if no report of it arrived, `done` is nan for the last stage: it returns tokens.
    """

    epoch: int
    iteration: int
    stage: int
    received: float
    done: float


@dataclass(slots=True)
class StageCounters:
    """What a stage reported about its iterations; `times` has the newest, oldest first."""

    link_bytes: int = 0  # put on the link to the next stage
    received: int = 0  # iterations that it took
    done: int = 0  # iterations that it reported as done; the last stage returns tokens instead
    times: deque[IterationTimes] = field(default_factory=lambda: deque[IterationTimes](maxlen=MAX_TIMES))
