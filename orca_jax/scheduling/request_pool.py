"""The request pool: all live requests in arrival order, under the engine's only lock (ORCA 4, Figure 4).

Any thread may add requests or ask for their end; only the scheduler's thread does everything else. A request
waits until the scheduler admits it, and is admitted until it is removed, or preempted and waits again.
Waiting requests are in the order of their queue. With the default queue that is the order of arrival, so all
admitted requests arrived before all waiting ones as long as none is preempted.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from orca_jax.errors import InvalidRequest, QueueFull, ServiceClosed
from orca_jax.request.request import PLAIN, FinishReason, Request
from orca_jax.scheduling.waiting_queue import FirstComeQueue, WaitingQueue

# A request, the number of new tokens at the end of its output, and its finish reason if it ended. A plain
# tuple for speed, like `Row`: each request of each iteration makes one.
Delivery = tuple[Request, int, FinishReason | None]


class InArrivalOrder:
    """Live requests, the admitted ones first, read lazily so that a long queue costs nothing.

    For the scheduler's thread, which must not admit or remove requests while it iterates. Requests that other
    threads add meanwhile may appear or not. `all_plain`: all admitted requests have plain rows.
    """

    def __init__(
        self,
        admitted: Iterable[Request],
        waiting: Callable[[], Iterator[list[Request]]],
        *,
        all_plain: bool = False,
    ) -> None:
        self.admitted = admitted
        self.all_plain = all_plain
        self._waiting = waiting

    def __iter__(self) -> Iterator[Request]:
        return chain(self.admitted, chain.from_iterable(self._waiting()))

    def waiting(self) -> Iterator[Request]:
        """The waiting requests in order."""
        return chain.from_iterable(self._waiting())


def split(live: Iterable[Request]) -> tuple[list[Request], Iterator[Request]]:
    """Separate the admitted requests, which come first, from the waiting ones."""
    if isinstance(live, InArrivalOrder):
        return list(live.admitted), live.waiting()
    every = list(live)
    n_admitted = sum(request.row >= 0 for request in every)
    return every[:n_admitted], iter(every[n_admitted:])


@dataclass(slots=True)
class _Usage:
    """The number of waiting requests, and the sum of their weights in bytes."""

    n: int = 0
    n_bytes: int = 0

    def add(self, request: Request, sign: int) -> None:
        self.n += sign
        self.n_bytes += sign * request.weight


class _Limit(NamedTuple):
    """The maximum number of waiting requests, and of their bytes."""

    n: int
    n_bytes: int

    def excess(self, usage: _Usage, request: Request) -> str:
        """Describe the current usage if `request` would exceed the limit; else ""."""
        if usage.n >= self.n:
            return f"{usage.n} requests"
        # A request larger than the whole limit may wait alone, or it could never run.
        if usage.n and usage.n_bytes + request.weight > self.n_bytes:
            return f"{usage.n} requests of {usage.n_bytes} bytes"
        return ""


def _no_op(_: Request) -> None:
    pass


class RequestPool:
    """All live requests, in arrival order.

    The queue of waiting requests is bounded: `max_waiting` limits their number, `max_bytes` the sum of their
    weights. No owner can fill the queue: each may have at most `max_each` waiting requests (None: no limit)
    and the same fraction of the bytes. `check` raises InvalidRequest to reject a request. `on_arrival` is
    called with each accepted request before the scheduler can see it. Both run on the thread that calls
    `add`. `on_deliveries` is called on the scheduler's thread, once with all deliveries of an iteration.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        max_bytes: int = 1 << 62,
        max_each: int | None = None,
        on_deliveries: Callable[[Sequence[Delivery]], None],
        on_arrival: Callable[[Request], None] = _no_op,
        check: Callable[[Request], None] = _no_op,
        queue: WaitingQueue | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = _Limit(max_waiting, max_bytes)
        self.max_each = max_waiting if max_each is None else max_each
        self._owner_limit = _Limit(self.max_each, max_bytes * self.max_each // max_waiting)
        self._on_deliveries = on_deliveries
        self._on_arrival = on_arrival
        self._check = check
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # All attributes below change only under the lock. Only the scheduler's thread changes `_admitted`, so
        # it may read it without the lock. `_admitted` is a dict because that is read faster than an
        # OrderedDict. Removals leave few gaps in it: an admission that finds no room closes them.
        self._queue = FirstComeQueue() if queue is None else queue
        self._waiting: dict[str, Request] = {}  # the requests in `_queue`, by id
        self._admitted: dict[str, Request] = {}
        self._n_of_other_kinds = 0  # admitted requests whose rows are not plain
        self._ending: dict[Request, FinishReason] = {}
        self._usage = _Usage()
        self._usage_of: dict[str, _Usage] = {}  # by owner, only those with waiting requests
        self._n_arrivals = 0
        self._activity = 0
        self._closed = False

    def __len__(self) -> int:
        """Live requests, waiting or admitted."""
        with self._lock:
            return len(self._waiting) + len(self._admitted)

    @property
    def n_waiting(self) -> int:
        """Requests that the scheduler has not admitted yet."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Requests that the scheduler has admitted: they hold slots and run."""
        return len(self._admitted)

    # For any thread.

    def admitted(self) -> list[Request]:
        """A copy of the list of admitted requests, oldest first."""
        with self._lock:
            return list(self._admitted.values())

    def live(self) -> list[Request]:
        """A copy of the list of live requests: the admitted ones, then the waiting ones in no set order."""
        with self._lock:
            return [*self._admitted.values(), *self._waiting.values()]

    def add(self, request: Request) -> None:
        """Add a new request to the queue and set its arrival number.

        Raises InvalidRequest if `check` rejects it or its id is in use, QueueFull or ServiceClosed. The pool
        is then unchanged.
        """
        self._check(request)
        with self._lock:
            if self._closed:
                raise ServiceClosed("the service is closed and accepts no more requests")
            if self._find(request.request_id) is not None:
                message = f"request_id {request.request_id!r} is in use by a live request; choose another"
                raise InvalidRequest(message, param="request_id")
            self._check_limits(request)
            request.arrival = self._n_arrivals
            self._on_arrival(request)
            self._n_arrivals += 1
            self._waiting[request.request_id] = request
            request.arrived = self._clock()
            self._enter(request, request.arrived)
            self._count(request, 1)
            self._notify()

    def end(self, request: Request, reason: FinishReason) -> bool:
        """Ask a request to end (cancelled, timeout); False if it is no longer live.

        The scheduler ends it within one iteration and delivers the reason. The first reason wins, and a
        request that finishes by itself meanwhile keeps its own reason. A newer live request with the same id
        is not affected.
        """
        with self._lock:
            return self._find(request.request_id) is request and self._ask_to_end(request, reason)

    def end_named(self, request_id: str, reason: FinishReason) -> bool:
        """Like `end`, for the live request with this id; False if there is none."""
        with self._lock:
            request = self._find(request_id)
            return request is not None and self._ask_to_end(request, reason)

    def close(self) -> None:
        """Accept no more requests; live requests continue."""
        with self._lock:
            self._closed = True
            self._notify()

    def activity(self) -> int:
        """A counter that grows whenever a request arrives or is asked to end, and on `close`."""
        return self._activity

    def wait_for_work(self, timeout: float, since: int | None = None) -> bool:
        """Wait up to `timeout` seconds for a live request or `close`; return whether a request is live.

        With `since`, wait until `activity` differs from it instead.
        """

        def has_work() -> bool:
            return (len(self) > 0 if since is None else self._activity != since) or self._closed

        with self._lock:
            self._changed.wait_for(has_work, timeout)
            return len(self) > 0

    def wake(self) -> None:
        """Let `activity` grow, because there is something other than a request to look at."""
        with self._lock:
            self._notify()

    # For the scheduler's thread.

    def in_arrival_order(self) -> InArrivalOrder:
        """The live requests: the admitted ones, then the waiting ones in the order of the queue.

        With the default queue this is the order of arrival (Algorithm 1, line 20).
        """
        return InArrivalOrder(self._admitted.values(), self._walk, all_plain=self.all_plain)

    @property
    def all_plain(self) -> bool:
        """Whether all admitted requests have plain rows."""
        return not self._n_of_other_kinds

    def admit(self, requests: Iterable[Request]) -> None:
        """Admit these waiting requests."""
        with self._lock:
            for request in requests:
                self._queue.take(request)
                del self._waiting[request.request_id]
                self._admitted[request.request_id] = request
                self._n_of_other_kinds += request.kind is not PLAIN
                self._count(request, -1)

    def preempt(self, request: Request) -> None:
        """Let an admitted request wait again, before requests that arrived later."""
        with self._lock:
            del self._admitted[request.request_id]
            self._n_of_other_kinds -= request.kind is not PLAIN
            self._waiting[request.request_id] = request
            self._queue.restore(request)
            self._count(request, 1)

    def take_ending(self) -> list[tuple[Request, FinishReason]]:
        """The live requests that were asked to end since the last call, with their reasons."""
        with self._lock:
            ending = list(self._ending.items())
            self._ending.clear()
            return ending

    def remove(self, request: Request) -> None:
        """Remove a request that has ended; its id can be used again."""
        with self._lock:
            if self._queue.remove(request):
                del self._waiting[request.request_id]
                self._count(request, -1)
            else:
                del self._admitted[request.request_id]
                self._n_of_other_kinds -= request.kind is not PLAIN
            self._ending.pop(request, None)

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Pass all deliveries of an iteration to `on_deliveries` in one call, if there are any."""
        if deliveries:
            if self._queue.counts_tokens:
                with self._lock:
                    self._queue.served([request for request, n_new, _ in deliveries for _ in range(n_new)])
            self._on_deliveries(deliveries)

    # Under the lock.

    def _enter(self, request: Request, now: float) -> None:
        self._queue.add(request, now)

    def _find(self, request_id: str) -> Request | None:
        return self._waiting.get(request_id) or self._admitted.get(request_id)

    def _ask_to_end(self, request: Request, reason: FinishReason) -> bool:
        if request.ending is None:
            request.ending = reason
            self._ending[request] = reason
            self._notify()
        return True

    def check_room(self, n: int, owner: str) -> None:
        """Raise QueueFull unless `n` more requests of this owner, which come together, may wait.

        Otherwise most would be accepted and then cancelled, which costs more than all the rest of a refusal.
        """
        with self._lock:
            free = self._limit.n - self._usage.n
            if owner:
                free = min(free, self._owner_limit.n - self._usage_of.get(owner, _Usage()).n)
        if n > free:
            raise QueueFull(f"the queue has room for {free} more requests, not for {n}; try again later")

    def _check_limits(self, request: Request) -> None:
        """Raise QueueFull if no more requests may wait, or no more of this owner."""
        excess = self._limit.excess(self._usage, request)
        if excess:
            raise QueueFull(f"the queue is full: {excess} are waiting; try again later")
        if request.owner:
            excess = self._owner_limit.excess(self._usage_of.get(request.owner, _Usage()), request)
            if excess:
                message = f"{excess} from this API key or address are waiting, its share of the queue; "
                raise QueueFull(message + "try again when some of them have started")

    def _count(self, request: Request, sign: int) -> None:
        """Count a request that enters (1) or leaves (-1) the queue."""
        self._usage.add(request, sign)
        if request.owner:
            usage = self._usage_of.setdefault(request.owner, _Usage())
            usage.add(request, sign)
            if not usage.n:
                del self._usage_of[request.owner]

    def _notify(self) -> None:
        self._activity += 1
        self._changed.notify_all()

    def _walk(self) -> Iterator[list[Request]]:
        """Read the queue in chunks, each under the lock."""
        chunks = self._queue.walk()
        while True:
            with self._lock:
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk
