"""A queue between threads that is bounded, in number and in bytes, and never makes its writer wait."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
LIMIT_BYTES = 1 << 30  # frames of an iteration take kilobytes; prompts' log-probabilities some megabytes


class FrameQueue(Generic[T]):
    """First in, first out, `limit` items and about `limit_bytes` at most; for any number of threads.

    `weigh` says how many bytes an item has. One item may be larger than the limit, where it is alone.
    """

    def __init__(
        self,
        limit: int,
        *,
        limit_bytes: int = LIMIT_BYTES,
        weigh: Callable[[T], int] = lambda _: 0,
    ) -> None:
        assert limit >= 1
        self.limit = limit
        self._limit_bytes = limit_bytes
        self._weigh = weigh
        self._n_bytes = 0
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = False

    def __len__(self) -> int:
        """How many items wait."""
        return len(self._items)

    def put(self, item: T, *, beyond_limit: bool = False) -> bool:
        """Add an item without waiting; False when the queue is full. After `end` it is dropped."""
        with self._changed:
            if self._ended:
                return True
            weight = self._weigh(item)
            full = len(self._items) >= self.limit
            full = full or (len(self._items) > 0 and self._n_bytes + weight > self._limit_bytes)
            if full and not beyond_limit:
                return False
            self._items.append(item)
            self._n_bytes += weight
            self._changed.notify()
            return True

    def get(self, timeout: float) -> T | None:
        """The next item; None when there is none within `timeout` seconds, or after `end`."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended, timeout)
            return self._pop() if self._items and not self._ended else None

    def end(self) -> None:
        """Drop what is in it and let nobody wait any longer."""
        with self._changed:
            self._ended = True
            self._items.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        """Every item as it comes, until `end`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._ended)
                if self._ended:
                    return
                item = self._pop()
            yield item

    def _pop(self) -> T:
        item = self._items.popleft()
        self._n_bytes -= self._weigh(item)
        return item
