"""The orders in which waiting requests are admitted. The pool calls them under its lock."""

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice

from orca_jax.config import SchedulingConfig
from orca_jax.request.request import Request

OUTPUT_COST = 2.0  # of an output token, when a prompt token costs 1 (w_q and w_p in the fairness paper)
_MAX_COUNTERS = 4096


class WaitingQueue(ABC):
    """The waiting requests in the order in which they are to be admitted."""

    counts_tokens = False  # whether the pool calls `served`

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def add(self, request: Request, now: float) -> None:
        """Add a new request; `now` is in seconds."""

    @abstractmethod
    def restore(self, request: Request) -> None:
        """Add a request that was admitted before and preempted. It goes before later ones of its class."""

    @abstractmethod
    def remove(self, request: Request) -> bool:
        """Remove a request because it has ended; False if it does not wait."""

    @abstractmethod
    def walk(self) -> Iterator[list[Request]]:
        """All requests in order, in chunks. Others may be added between two chunks, none removed."""

    def take(self, request: Request) -> None:
        """Remove a request because it is admitted."""
        was_waiting = self.remove(request)
        assert was_waiting, f"{request.request_id} does not wait"

    def served(self, requests: Iterable[Request]) -> None:  # noqa: B027
        """Each of these requests got an output token. Called only if `counts_tokens`."""


class FirstComeQueue(WaitingQueue):
    """First come, first served, as in Algorithm 1. All calls but `restore` are O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()  # by arrival number

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, now: float) -> None:
        self._requests[request.arrival] = request

    def restore(self, request: Request) -> None:
        _put_in_order(self._requests, request)

    def take(self, request: Request) -> None:
        del self._requests[request.arrival]

    def remove(self, request: Request) -> bool:
        return self._requests.pop(request.arrival, None) is not None

    def walk(self) -> Iterator[list[Request]]:
        return _chunks(self._requests)


class PriorityQueue(WaitingQueue):
    """Lower `priority` first. One level counts as much as `aging_seconds` of waiting.

    Nobody waits for ever, because a request is overtaken only by those that arrive less than `aging_seconds`
    times the difference of their priorities later. The order of two requests never changes: both age alike.
    Adding or removing a request moves one pointer for each request before it.
    """

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._requests: dict[tuple[float, int], Request] = {}
        # The keys of `_requests`. They are negative, so the first requests are last, where removal is cheap.
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


class FairQueue(WaitingQueue):
    """Fair shares: the virtual token counter of "Fairness in Serving Large Language Models" (OSDI 2024).

    Each owner (API key or address) has a counter of the tokens it was served, divided by its weight. The
    owner with the lowest counter goes next, so owners who always wait are served equally, whatever they send.
    An owner's requests are served first come, first served.

    `weights` are owners' shares; those not in it have 1. While two owners both wait, the lower counter is
    behind by at most the cost of one prompt and of all outputs of the admitted requests, divided by the
    weight of the owner ahead: that owner gets nothing more until the other catches up (the paper's Lemma
    4.3). An owner with nothing waiting does not save up what it leaves unused: it continues at the lowest
    counter of those who wait. A call moves at most one pointer for each owner who waits.
    """

    counts_tokens = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        self._requests: dict[str, OrderedDict[int, Request]] = {}  # only owners with waiting requests
        self._order: list[tuple[float, str]] = []  # these owners, after their counters
        self._counters: dict[str, float] = {}
        self._most_counters = 2 * _MAX_COUNTERS
        self._last_counter = 0.0  # of the owner whose request was admitted last
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def counter(self, owner: str) -> float:
        """The cost of the tokens that this owner was served, divided by its weight."""
        return self._counters.get(owner, 0.0)

    def add(self, request: Request, now: float) -> None:
        self._insert(request)

    def restore(self, request: Request) -> None:
        self._insert(request)
        _put_in_order(self._requests[request.owner], request)

    def take(self, request: Request) -> None:
        counter = self._counters[request.owner]
        super().take(request)
        self._last_counter = counter
        self._charge(request.owner, _cost_to_admit(request))

    def remove(self, request: Request) -> bool:
        owner = request.owner
        requests = self._requests.get(owner)
        if requests is None or requests.pop(request.arrival, None) is None:
            return False
        self._n -= 1
        if not requests:
            del self._requests[owner]
            self._drop_from_order(owner)
        return True

    def walk(self) -> Iterator[list[Request]]:
        """One request at a time, as if each were admitted before the next is chosen."""
        # Owners with a request in the walk: their counters after it, and their next requests.
        begun: list[tuple[float, str, Iterator[Request], Request]] = []
        key = (float("-inf"), "")
        while True:
            place = bisect_right(self._order, key)  # others may have been inserted before it
            if place < len(self._order) and (not begun or self._order[place] < begun[0][:2]):
                key = self._order[place]
                counter, owner = key
                requests = chain.from_iterable(_chunks(self._requests[owner]))
                request = next(requests)
            elif begun:
                counter, owner, requests, request = heapq.heappop(begun)
            else:
                return
            yield [request]
            following = next(requests, None)
            if following is not None:
                counter += self._cost(owner, _cost_to_admit(request))
                heapq.heappush(begun, (counter, owner, requests, following))

    def served(self, requests: Iterable[Request]) -> None:
        n_tokens = Counter[str]()
        for request in requests:
            n_tokens[request.owner] += request.kind.n_rows
        for owner, n in n_tokens.items():
            self._charge(owner, n * OUTPUT_COST)

    def _insert(self, request: Request) -> None:
        owner = request.owner
        if owner not in self._requests:
            lowest = self._order[0][0] if self._order else self._last_counter
            counter = self._counters[owner] = max(self.counter(owner), lowest)
            self._requests[owner] = OrderedDict()
            insort(self._order, (counter, owner))
            if len(self._counters) > self._most_counters:
                self._forget_idle_owners(lowest)
        self._requests[owner][request.arrival] = request
        self._n += 1

    def _cost(self, owner: str, tokens: float) -> float:
        return tokens / self.weights.get(owner, 1.0)

    def _charge(self, owner: str, tokens: float) -> None:
        if owner not in self._counters:
            return
        waits = owner in self._requests
        if waits:
            self._drop_from_order(owner)
        self._counters[owner] += self._cost(owner, tokens)
        if waits:
            insort(self._order, (self._counters[owner], owner))

    def _drop_from_order(self, owner: str) -> None:
        del self._order[bisect_left(self._order, (self._counters[owner], owner))]

    def _forget_idle_owners(self, lowest: float) -> None:
        """Bound the memory: an owner who would continue at the lowest counter anyway needs no counter.

        If the others are too many, the highest counters stay. The next call comes after as many new owners
        as there are then, so the cost for each owner is constant.
        """
        kept = {owner: self._counters[owner] for owner in self._requests}
        ahead = [owner for owner, n in self._counters.items() if n > lowest and owner not in kept]
        for owner in heapq.nlargest(_MAX_COUNTERS, ahead, key=self.counter):
            kept[owner] = self._counters[owner]
        self._counters = kept
        self._most_counters = 2 * max(_MAX_COUNTERS, len(kept))


def _cost_to_admit(request: Request) -> int:
    """The tokens of its prompt; 0 after a preemption, because they were charged before."""
    return 0 if request.n_preempted else request.n_input


def _put_in_order(requests: OrderedDict[int, Request], request: Request) -> None:
    """Insert a preempted request by its arrival number.

    It is usually the oldest, because the latest arrivals are preempted first.
    """
    older: list[int] = []
    for arrival in requests:
        if arrival > request.arrival:
            break
        if arrival != request.arrival:
            older.append(arrival)
    requests[request.arrival] = request
    for arrival in (request.arrival, *reversed(older)):
        requests.move_to_end(arrival, last=False)


def _chunks(requests: Mapping[int, Request]) -> Iterator[list[Request]]:
    """The requests in chunks that double, so reading all is linear. Others may be added at the end."""
    n = 0
    while chunk := list(islice(requests.values(), n, 2 * n + 8)):
        yield chunk
        n += len(chunk)


def waiting_queue(config: SchedulingConfig) -> WaitingQueue:
    """The queue for the configured scheduling policy."""
    if config.scheduling_policy == "priority":
        return PriorityQueue(config.aging_seconds)
    return FairQueue() if config.scheduling_policy == "fair" else FirstComeQueue()
