"""Fair shares: the virtual token counter of "Fairness in Serving Large Language Models" (OSDI 2024).

Each owner (API key or address) has a counter of the tokens it was served, divided by its weight. The owner
with the lowest counter goes next, so owners who always wait are served equally, whatever they send.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from orca_jax.request.request import Request

_OUTPUT_COST = 2.0  # of an output token, when a prompt token costs 1 (the paper's w_q and w_p)
_MAX_COUNTERS = 4096


class FairQueue:
    """Waiting requests by owner, first come, first served within each.

    `weights` are owners' shares; those not in it have 1. While two owners both wait, the difference of their
    counters is bounded by the cost of one prompt and of the output of a batch (the paper's Lemma 4.3). An
    owner with nothing waiting does not save up what it leaves unused: it continues at the lowest counter of
    those who wait.
    """

    counts_tokens = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._requests: dict[str, OrderedDict[int, Request]] = {}  # only owners with waiting requests
        self._counters: dict[str, float] = {}
        self._last_counter = 0.0  # of the owner whose request was admitted last
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def counter(self, owner: str) -> float:
        """The cost of the tokens that this owner was served, divided by its weight."""
        return self._counters.get(owner, 0.0)

    def add(self, request: Request, now: float) -> None:
        owner = request.owner
        if owner not in self._requests:
            lowest = min((self._counters[other] for other in self._requests), default=self._last_counter)
            self._counters[owner] = max(self._counters.get(owner, 0.0), lowest)
            self._forget_idle_owners(lowest)
        self._insert(request)

    def restore(self, request: Request) -> None:
        """It goes before the others of its owner."""
        self._counters.setdefault(request.owner, self._last_counter)
        self._insert(request)
        requests = self._requests[request.owner]
        for arrival in sorted((a for a in requests if a <= request.arrival), reverse=True):
            requests.move_to_end(arrival, last=False)

    def take(self, request: Request) -> None:
        was_waiting = self.remove(request)
        assert was_waiting, f"{request.request_id} does not wait"
        self._last_counter = self._counters[request.owner]
        if not request.n_preempted:  # else it was charged before
            self._charge(request.owner, len(request.prompt_ids))

    def remove(self, request: Request) -> bool:
        requests = self._requests.get(request.owner)
        if requests is None or requests.pop(request.arrival, None) is None:
            return False
        self._n -= 1
        if not requests:
            del self._requests[request.owner]
        return True

    def walk(self) -> Iterator[list[Request]]:
        """One request at a time, as if each were admitted before the next is chosen."""
        heap = [(self._counters[owner], owner, 0) for owner in self._requests]
        heapq.heapify(heap)
        while heap:
            counter, owner, n_taken = heap[0]
            request = next(islice(self._requests[owner].values(), n_taken, None), None)
            if request is None:
                heapq.heappop(heap)
                continue
            yield [request]
            counter += self._cost(owner, len(request.prompt_ids))
            heapq.heapreplace(heap, (counter, owner, n_taken + 1))

    def served(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._charge(request.owner, _OUTPUT_COST)

    def _insert(self, request: Request) -> None:
        self._requests.setdefault(request.owner, OrderedDict())[request.arrival] = request
        self._n += 1

    def _cost(self, owner: str, tokens: float) -> float:
        return tokens / self._weights.get(owner, 1.0)

    def _charge(self, owner: str, tokens: float) -> None:
        if owner in self._counters:
            self._counters[owner] += self._cost(owner, tokens)

    def _forget_idle_owners(self, lowest: float) -> None:
        """Bound the memory: an owner who would continue at the lowest counter anyway needs none."""
        if len(self._counters) > _MAX_COUNTERS:
            self._counters = {
                owner: counter
                for owner, counter in self._counters.items()
                if owner in self._requests or counter > lowest
            }
            if len(self._counters) > 2 * _MAX_COUNTERS:  # keep the highest
                idle = sorted(self._counters.keys() - self._requests.keys(), key=self.counter)
                for owner in idle[: len(self._counters) - _MAX_COUNTERS]:
                    del self._counters[owner]
