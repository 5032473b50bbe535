"""Orders of waiting requests other than first come, first served. The pool calls them under its lock."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from orca_jax.request.request import Request
from orca_jax.scheduling.fair_queue import FairQueue
from orca_jax.scheduling.request_pool import FirstComeQueue, WaitingQueue
from orca_jax.scheduling_config import SchedulingConfig


class PriorityQueue:
    """Lower `priority` first. One level counts as much as `aging_seconds` of waiting.

    So nobody waits for ever: a request is overtaken only by those that arrive less than `aging_seconds` times
    the difference of their priorities after it. The order of two requests never changes, because both age
    alike. `add` moves a pointer for each request before the new one, and removal for each before that one.
    """

    counts_tokens = False

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._requests: dict[tuple[float, int], Request] = {}
        # Its keys, which are negative, so that the first requests are last: they are cheap to remove there.
        self._order: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, now: float) -> None:
        request.rank = now + request.priority * self._aging_seconds
        self.restore(request)

    def restore(self, request: Request) -> None:
        key = -request.rank, -request.arrival
        self._requests[key] = request
        insort(self._order, key)

    def take(self, request: Request) -> None:
        was_waiting = self.remove(request)
        assert was_waiting, f"{request.request_id} does not wait"

    def remove(self, request: Request) -> bool:
        key = -request.rank, -request.arrival
        if self._requests.pop(key, None) is None:
            return False
        del self._order[bisect_left(self._order, key)]
        return True

    def walk(self) -> Iterator[list[Request]]:
        n = 8
        keys = self._order[-n:]
        while keys:
            yield [self._requests[key] for key in reversed(keys)]
            stop = bisect_left(self._order, keys[0])  # others may have been inserted before it
            n *= 2
            keys = self._order[max(0, stop - n) : stop]

    def served(self, requests: Iterable[Request]) -> None:
        pass


def waiting_queue(config: SchedulingConfig) -> WaitingQueue:
    """The queue of this order."""
    if config.scheduling_policy == "priority":
        return PriorityQueue(config.aging_seconds)
    return FairQueue() if config.scheduling_policy == "fair" else FirstComeQueue()
