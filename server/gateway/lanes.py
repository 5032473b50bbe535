"""Threads for expensive work, shared fairly among the clients that send it.

A client that sends much expensive work waits for its own work only: a lane serves its owners by the processor
time that their work has taken, as the scheduler serves them by tokens. The owner is a variable of the current
task (`act_for`), set where a request's key or address is read. Callers do not pass it, so none can forget to.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

from orca_jax.errors import QueueFull
from server.errors import Overloaded

T = TypeVar("T")

# How long an idle thread stays: starting one makes the event loop wait until the new thread has had the GIL.
_IDLE_SECONDS = 10.0

_owner: ContextVar[str] = ContextVar("owner", default="")


def act_for(owner: str) -> None:
    """Charge the current task's work to `owner`, an API key or a client's address, from now on."""
    _owner.set(owner)


@dataclass(eq=False, slots=True)
class _Work:
    n_bytes: int
    call: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future[Any])


@dataclass(eq=False, slots=True)
class _Share:
    """One owner's work in a lane. `seconds` is the processor time that counts against the owner."""

    seconds: float
    waiting: deque[_Work] = field(default_factory=deque[_Work])
    n_running: int = 0
    n_bytes: int = 0  # waiting and running

    @property
    def n(self) -> int:
        return len(self.waiting) + self.n_running


class Lane:
    """A few threads with a bounded queue for each owner. Usable from any thread and any event loop.

    The owner whose work has taken the least processor time is served next. An idle owner earns no credit:
    when it returns, it starts level with the owner served last.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        most_waiting: int | None = None,
        most_bytes: int | None = None,
        what: str = "long requests",
        meter: Callable[[], float] = time.thread_time,
    ) -> None:
        """At most `most_waiting` requests, of `most_bytes` together, may wait or run; None: any number.

        An owner may hold as much of both as is still free: half if it is alone, a third each if there are
        two. So nobody can fill a lane alone: it takes six owners to fill 32 places, and ten to fill 512. An
        owner with work in the lane is refused for its own share (QueueFull); an owner without any is refused
        only when others fill the lane (Overloaded). Each owner waits for its own work, and for one piece of
        work of every other owner. If nothing waits, a request is accepted whatever its size.

        One owner has at most half of the threads, and at least one. `what` names the work in errors; `meter`
        reads the processor time of the current thread.
        """
        self._name, self._what, self._meter = name, what, meter
        self._threads, self._threads_each = threads, max(1, threads // 2)
        self._most_waiting, self._most_bytes = most_waiting, most_bytes
        self._lock = threading.Lock()
        self._called = threading.Condition(self._lock)
        self._shares = dict[str, _Share]()  # by owner, in the order of their last turns
        self._present = 0.0  # the `seconds` of the owner whose turn was last
        self._n = self._n_bytes = 0  # waiting and running
        self._n_threads = 0
        self._n_idle = self._n_called = 0  # threads that wait for work; how many of these are notified
        self._thread_numbers = count()
        self.n_done = 0

    async def run(self, n_bytes: int, work: Callable[[], T]) -> T:
        """Do `work`, whose cost grows with `n_bytes`, on a thread and return its result.

        Cancelling the call frees the place of work that still waits. Raises QueueFull if too much of this
        owner's work waits, Overloaded if others fill the lane, and what `work` raises.
        """
        return await asyncio.wrap_future(self._queue(_owner.get(), _Work(n_bytes, work)))

    def _queue(self, owner: str, work: _Work) -> Future[Any]:
        with self._lock:
            share = self._shares.get(owner) or _Share(self._present)
            self._check_room(share, work)
            self._shares[owner] = share
            if not share.n:
                share.seconds = max(share.seconds, self._present)
            share.waiting.append(work)
            share.n_bytes += work.n_bytes
            self._n += 1
            self._n_bytes += work.n_bytes
            is_idle = self._n_idle > self._n_called
            if is_idle:
                self._n_called += 1
                self._called.notify()
            starts = not is_idle and self._n_threads < self._threads
            self._n_threads += starts
        # The callback must not hold the work: the future would then be in a cycle with itself and its result.
        work.future.add_done_callback(partial(self._release, share, work.n_bytes))
        if starts:
            self._start_thread()
        return work.future

    def _check_room(self, share: _Share, work: _Work) -> None:
        n, n_bytes = self._most_waiting, self._most_bytes
        if self._n and (
            (n is not None and share.n + 1 > n - self._n)
            or (n_bytes is not None and share.n_bytes + work.n_bytes > n_bytes - self._n_bytes)
        ):
            if not share.n:
                message = f"{self._n} {self._what} of other clients wait, the limit"
                raise Overloaded(f"{message}; try again later")
            yours = f", {share.n} of them yours" if share.n < self._n else ""
            raise QueueFull(f"{self._n} {self._what} wait{yours}, the limit; try again later")

    def _start_thread(self) -> None:
        name = f"{self._name}_{next(self._thread_numbers)}"
        try:
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        except BaseException as error:  # no thread could be started
            failed = list[_Work]()
            with self._lock:
                self._n_threads -= 1
                if not self._n_threads:
                    for share in self._shares.values():
                        failed += share.waiting
                        share.waiting.clear()
            for work in failed:
                if work.future.set_running_or_notify_cancel():
                    work.future.set_exception(error)

    def _serve(self) -> None:
        """Do work, until none has come for a while."""
        while True:
            with self._lock:
                while (taken := self._next()) is None:
                    if not self._is_called():
                        self._n_threads -= 1
                        return
            share, work = taken
            began = self._meter()
            finish = _run(work)
            with self._lock:
                share.n_running -= 1
                share.seconds += self._meter() - began
            del taken, work
            finish()
            del finish

    def _is_called(self) -> bool:
        """Wait until this thread is called to work; False if that takes too long."""
        self._n_idle += 1
        self._called.wait(_IDLE_SECONDS)
        self._n_idle -= 1
        if not self._n_called:
            return False
        self._n_called -= 1
        return True

    def _next(self) -> tuple[_Share, _Work] | None:
        least: tuple[str, _Share] | None = None
        for owner, share in list(self._shares.items()):
            if not share.n and share.seconds <= self._present:
                del self._shares[owner]  # an owner that is not remembered starts level too
            elif (
                share.waiting
                and share.n_running < self._threads_each
                and (least is None or share.seconds < least[1].seconds)
            ):
                least = owner, share
        if least is None:
            return None
        owner, share = least
        self._shares[owner] = self._shares.pop(owner)  # so that it is the last among equals
        self._present = max(self._present, share.seconds)
        share.n_running += 1
        return share, share.waiting.popleft()

    def _release(self, share: _Share, n_bytes: int, future: Future[Any]) -> None:
        with self._lock:
            if future.cancelled():
                place = next((i for i, work in enumerate(share.waiting) if work.future is future), None)
                if place is not None:
                    del share.waiting[place]
            share.n_bytes -= n_bytes
            self._n -= 1
            self._n_bytes -= n_bytes
            self.n_done += 1
            if not self._n:
                self._shares.clear()
                self._present = 0.0


def _run(work: _Work) -> Callable[[], None]:
    """Do the work, unless it was cancelled. Returns a function that hands the result to the caller."""
    if not work.future.set_running_or_notify_cancel():
        return lambda: None
    future, call = work.future, work.call
    try:
        return partial(future.set_result, call())
    except BaseException as error:
        return partial(future.set_exception, error)
    finally:
        del work, future, call  # an error's traceback has this frame, and must not hold the work
