"""Queues of waiting requests, each in its order of service. The request pool calls them under its lock."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from orca_jax.request.request import Request
from orca_jax.scheduling.fair_queue import FairQueue
from orca_jax.scheduling_config import SchedulingConfig


class WaitingQueue(Protocol):
    """The waiting requests in the order in which they are to be admitted."""

    counts_tokens: bool  # whether `served` is to be called

    def __len__(self) -> int: ...

    def add(self, request: Request, now: float) -> None:
        """Add a new request; `now` is in seconds."""
        ...

    def restore(self, request: Request) -> None:
        """Add a request that was admitted before and preempted."""
        ...

    def take(self, request: Request) -> None:
        """Remove a request because it is admitted."""
        ...

    def remove(self, request: Request) -> bool:
        """Remove a request because it has ended; False if it does not wait."""
        ...

    def walk(self) -> Iterator[list[Request]]:
        """All requests in order, in chunks. Others may be added between two chunks, none removed."""
        ...

    def served(self, requests: Iterable[Request]) -> None:
        """Each of these requests got an output token."""
        ...


class FirstComeQueue:
    """First come, first served, as in Algorithm 1. All calls are O(1)."""

    counts_tokens = False

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()  # by arrival number

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, now: float) -> None:
        self._requests[request.arrival] = request

    def restore(self, request: Request) -> None:
        """Usually it is older than all that wait, because the latest arrivals are preempted first."""
        older: list[int] = []
        for arrival in self._requests:
            if arrival > request.arrival:
                break
            older.append(arrival)
        self._requests[request.arrival] = request
        for arrival in (request.arrival, *reversed(older)):
            self._requests.move_to_end(arrival, last=False)

    def take(self, request: Request) -> None:
        del self._requests[request.arrival]

    def remove(self, request: Request) -> bool:
        return self._requests.pop(request.arrival, None) is not None

    def walk(self) -> Iterator[list[Request]]:
        """Chunks double, so reading all is linear. Requests are only added at the end, so none moves."""
        n = 0
        while chunk := list(islice(self._requests.values(), n, 2 * n + 8)):
            yield chunk
            n += len(chunk)

    def served(self, requests: Iterable[Request]) -> None:
        pass


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
    if config.order == "priority":
        return PriorityQueue(config.aging_seconds)
    return FairQueue() if config.order == "fair" else FirstComeQueue()
