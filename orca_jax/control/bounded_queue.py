"""A thread-safe queue bounded in items and in bytes; a writer never blocks."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
LIMIT_BYTES = 1 << 30  # an iteration's frames take kilobytes; prompt log-probabilities, a few megabytes


class FrameQueue(Generic[T]):
    """A FIFO of at most `limit` items and about `limit_bytes`, for any number of threads.

    `weigh` returns an item's bytes. An empty queue accepts an item larger than `limit_bytes`.
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
        return len(self._items)

    def put(self, item: T, *, beyond_limit: bool = False) -> bool:
        """Add an item without blocking; return False when the queue is full. Drops the item after `end`."""
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
        """Return the next item, or None after `timeout` seconds or after `end`."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended, timeout)
            return self._pop() if self._items and not self._ended else None

    def end(self) -> None:
        """Drop all items and release all waiting readers."""
        with self._changed:
            self._ended = True
            self._items.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        """Yield items as they arrive, until `end`."""
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
