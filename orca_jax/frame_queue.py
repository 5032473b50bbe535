"""A queue between threads that is bounded and never makes its writer wait."""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FrameQueue(Generic[T]):
    """First in, first out, `limit` items at most; for any number of threads."""

    def __init__(self, limit: int) -> None:
        assert limit >= 1
        self.limit = limit
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
            if len(self._items) >= self.limit and not beyond_limit:
                return False
            self._items.append(item)
            self._changed.notify()
            return True

    def get(self, timeout: float) -> T | None:
        """The next item; None when there is none within `timeout` seconds, or after `end`."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended, timeout)
            return self._items.popleft() if self._items and not self._ended else None

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
                item = self._items.popleft()
            yield item
