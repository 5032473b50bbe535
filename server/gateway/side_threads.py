"""Work that grows with what clients send, on threads of its own: the event loop does none of it.

Python runs one thread at a time, so a thread alone does not keep the loop going: no call of a function in C
may take long in it either (`http/bodies/json_text.py` sees to that for bodies).
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from orca_jax.errors import QueueFull

T = TypeVar("T")

LONG = 8_000  # bytes, characters or tokens; what takes longer than a millisecond or two is not for the loop
_VERY_LONG = 128_000  # has a thread to itself, so that what is short need not wait for it
_MOST_BYTES = 64 << 20


class Lane:
    """A few threads, and a bounded wait for them. For any thread and any event loop."""

    def __init__(self, name: str, *, threads: int, most_waiting: int, most_bytes: int) -> None:
        """Work for `most_waiting` requests may wait or run, with `most_bytes` together; one may always."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most_waiting, self._most_bytes = most_waiting, most_bytes
        self._lock = threading.Lock()
        self._n_waiting = self._n_bytes = 0
        self.n_done = 0

    async def run(self, n_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, which grows with `n_bytes`. Raises QueueFull, and whatever `work` does."""
        with self._lock:
            if self._n_waiting and (
                self._n_waiting >= self._most_waiting or self._n_bytes + n_bytes > self._most_bytes
            ):
                message = f"{self._n_waiting} long requests wait to be read, as many as may; try again later"
                raise QueueFull(message)
            self._n_waiting += 1
            self._n_bytes += n_bytes

        def over(_: Future[T]) -> None:
            with self._lock:
                self._n_waiting -= 1
                self._n_bytes -= n_bytes
                self.n_done += 1

        try:
            future = self._threads.submit(work)
        except BaseException:  # no thread could be started
            over(Future())
            raise
        future.add_done_callback(over)
        return await asyncio.wrap_future(future)


# One set for the process, which has one server: they are threads, of which more would not run at a time.
_LONG = Lane("long", threads=1, most_waiting=256, most_bytes=_MOST_BYTES)
_LONGEST = Lane("longest", threads=1, most_waiting=32, most_bytes=_MOST_BYTES)
_ANSWERS = ThreadPoolExecutor(2, thread_name_prefix="answers")


def n_very_long() -> int:
    """Requests so far whose size needed a thread to itself."""
    return _LONGEST.n_done


async def reading(n_bytes: int, work: Callable[[], T]) -> T:
    """Work on what a request has sent, before it is accepted: on a thread where it is much.

    Raises QueueFull where too much waits already.
    """
    if n_bytes <= LONG:
        return work()
    return await (_LONG if n_bytes <= _VERY_LONG else _LONGEST).run(n_bytes, work)


async def beside(n_characters: int, work: Callable[[], T]) -> T:
    """Work on an answer, which is never refused: the number of live requests bounds it."""
    if n_characters <= LONG:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_ANSWERS, work)
