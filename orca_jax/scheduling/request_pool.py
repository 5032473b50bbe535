"""The request pool: every live request in arrival order, behind the engine's one lock (ORCA 4, Figure 4).

Any thread may add requests or ask for their end; the scheduler's thread alone does everything else. A
request waits until the scheduler admits it, and is admitted from then until it is removed. Both kinds stand
in arrival order, and the admitted ones all came before the waiting ones, because the scheduler admits from
the front.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from orca_jax.errors import InvalidRequest, QueueFull, ServiceClosed
from orca_jax.request.request import FinishReason, Request

# What a request's user is to see: the request, a token, and the finish reason; a token, a reason, or both. A
# plain tuple for the same reason as `Row`: one is made for every row of every iteration.
Delivery = tuple[Request, int | None, FinishReason | None]


class InArrivalOrder:
    """Live requests, oldest first, read no further than the reader goes: a long queue costs nothing.

    For the scheduler's thread, which must not admit or remove while it reads. Requests that others add
    meanwhile are seen at the end, or next time.
    """

    def __init__(self, admitted: Iterable[Request], waiting_after: Callable[[int], list[Request]]) -> None:
        self._admitted = admitted
        self._waiting_after = waiting_after

    def __iter__(self) -> Iterator[Request]:
        yield from self._admitted
        n_read = 0
        while chunk := self._waiting_after(n_read):
            yield from chunk
            n_read += len(chunk)


@dataclass(slots=True)
class _Held:
    """Waiting requests and the sum of their weights, in bytes."""

    n: int = 0
    n_bytes: int = 0

    def add(self, request: Request, sign: int) -> None:
        self.n += sign
        self.n_bytes += sign * request.weight


class _Room(NamedTuple):
    """How many requests may wait, and how many bytes they may keep."""

    n: int
    n_bytes: int

    def lacks(self, held: _Held, request: Request) -> str:
        """What there is too much of already, where `request` does not fit beside what is held; else ""."""
        if held.n >= self.n:
            return f"{held.n} requests wait"
        # One that is larger than all the room may wait alone, or it could never run.
        if held.n and held.n_bytes + request.weight > self.n_bytes:
            return f"{held.n} requests of {held.n_bytes} bytes wait"
        return ""


def _no_op(_: Request) -> None:
    pass


class RequestPool:
    """Every live request, in arrival order; add, end and deliver.

    `max_waiting` bounds the requests that wait, `max_bytes` the sum of their weights. One owner may have
    `max_each` of them waiting (None: all), and as large a part of the bytes, so that nobody locks everybody
    else out. `check` raises an InvalidRequest for one that must not enter; `on_arrival` hears of each that
    did, before the scheduler can see it; `on_deliveries` takes all deliveries of an iteration in one call.
    The last is called on the scheduler's thread, the others on the adder's.
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
    ) -> None:
        self._all = _Room(max_waiting, max_bytes)
        each = max_waiting if max_each is None else max_each
        self._each = _Room(each, max_bytes * each // max_waiting)
        self._on_deliveries = on_deliveries
        self._on_arrival = on_arrival
        self._check = check
        self._lock = threading.Condition()
        # All below is changed under the lock. `_admitted` is changed by the scheduler's thread alone, which
        # may so read it without. Ordered dictionaries: leaving from anywhere costs O(1), leaving no gap.
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._admitted: OrderedDict[str, Request] = OrderedDict()
        self._ending: dict[Request, FinishReason] = {}
        self._held = _Held()  # by all that wait
        self._held_by: dict[str, _Held] = {}  # the same by owner; those who hold nothing are left out
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
        """Requests that the scheduler has admitted: they hold slots and take part in iterations."""
        return len(self._admitted)

    # For any thread.

    def admitted(self) -> list[Request]:
        """Those requests, oldest first: a copy, for a look from outside."""
        with self._lock:
            return list(self._admitted.values())

    def add(self, request: Request) -> None:
        """Take a new request in: it gets its arrival number and waits.

        Raises InvalidRequest (a request that may not enter, or whose id is that of a live one), QueueFull,
        ServiceClosed. Nothing has changed then.
        """
        self._check(request)
        with self._lock:
            if self._closed:
                raise ServiceClosed("the request came after the service was closed")
            if self._find(request.request_id) is not None:
                message = f"request_id {request.request_id!r} is that of a live request; give each its own"
                raise InvalidRequest(message, param="request_id")
            self._check_room(request)
            request.arrival = self._n_arrivals
            self._on_arrival(request)
            self._n_arrivals += 1
            self._waiting[request.request_id] = request
            self._count(request, 1)
            self._tell()

    def end(self, request: Request, reason: FinishReason) -> bool:
        """Ask a request to end (cancelled, timeout); False when it is not live.

        The scheduler acts on it within one iteration, and tells the reason in a delivery. The first reason
        counts; a request that finishes on its own meanwhile keeps its own reason. Another live request that
        has the same id by now is not touched.
        """
        with self._lock:
            return self._find(request.request_id) is request and self._ask_to_end(request, reason)

    def end_named(self, request_id: str, reason: FinishReason) -> bool:
        """The same for whichever live request has that id now; False when none has."""
        with self._lock:
            request = self._find(request_id)
            return request is not None and self._ask_to_end(request, reason)

    def close(self) -> None:
        """Let nobody in any more; what is live goes on."""
        with self._lock:
            self._closed = True
            self._tell()

    def activity(self) -> int:
        """A count that grows whenever a request arrives or is asked to end."""
        return self._activity

    def wait_for_work(self, timeout: float) -> bool:
        """Wait until a request is live, the pool is closed, or `timeout` seconds; whether one is live."""
        with self._lock:
            self._lock.wait_for(lambda: len(self) > 0 or self._closed, timeout)
            return len(self) > 0

    # For the scheduler's thread.

    def in_arrival_order(self) -> InArrivalOrder:
        """The live requests, oldest first (Algorithm 1, line 20)."""
        return InArrivalOrder(self._admitted.values(), self._waiting_after)

    def admit(self, requests: Iterable[Request]) -> None:
        """These wait no longer: the oldest waiting ones, in their order."""
        with self._lock:
            for request in requests:
                oldest_id, oldest = self._waiting.popitem(last=False)
                assert oldest is request, f"{request.request_id} admitted before {oldest_id}"
                self._admitted[oldest_id] = oldest
                self._count(oldest, -1)

    def take_ending(self) -> list[tuple[Request, FinishReason]]:
        """The live requests that were asked to end since the last call, each with the reason."""
        with self._lock:
            ending = list(self._ending.items())
            self._ending.clear()
            return ending

    def remove(self, request: Request) -> None:
        """Take a request out that has ended; its id is free again."""
        with self._lock:
            if self._waiting.pop(request.request_id, None) is not None:
                self._count(request, -1)
            else:
                del self._admitted[request.request_id]
            self._ending.pop(request, None)

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Hand an iteration's deliveries out, all in one call; nothing is handed out if there is none."""
        if deliveries:
            self._on_deliveries(deliveries)

    # Under the lock.

    def _find(self, request_id: str) -> Request | None:
        return self._waiting.get(request_id) or self._admitted.get(request_id)

    def _ask_to_end(self, request: Request, reason: FinishReason) -> bool:
        if request.ending is None:
            request.ending = reason
            self._ending[request] = reason
            self._tell()
        return True

    def _check_room(self, request: Request) -> None:
        """Raise QueueFull where one more may not wait."""
        full = self._all.lacks(self._held, request)
        if full:
            raise QueueFull(f"{full}, as many as may; try again later")
        if request.owner:
            full = self._each.lacks(self._held_by.get(request.owner, _Held()), request)
            if full:
                message = f"{full} for this API key or address, which is its share of the queue; "
                raise QueueFull(message + "wait until some of them have begun")

    def _count(self, request: Request, sign: int) -> None:
        """Count a request that waits (1) or waits no longer (-1)."""
        self._held.add(request, sign)
        if request.owner:
            held = self._held_by.setdefault(request.owner, _Held())
            held.add(request, sign)
            if not held.n:
                del self._held_by[request.owner]

    def _tell(self) -> None:
        self._activity += 1
        self._lock.notify_all()

    def _waiting_after(self, n: int) -> list[Request]:
        """Some of the waiting requests behind the first `n`, ever more of them: reading all is so linear.

        Others add at the back only, so what stands behind the first `n` stays there while it is read.
        """
        with self._lock:
            return list(islice(self._waiting.values(), n, 2 * n + 8))
