"""A bounded queue of a child's output lines; a full queue blocks its writer."""

import threading
from collections import deque

LIMIT_LINES = 4096
LIMIT_BYTES = 256 << 20  # a benchmark's answer may hold millions of numbers


class LineQueue:
    """A FIFO of at most `limit` lines and `limit_bytes`, for one writer and one reader.

    A full queue blocks the writer, so the child's pipe fills and the child waits (back-pressure).
    """

    def __init__(self, *, limit: int = LIMIT_LINES, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit, self._limit_bytes = limit, limit_bytes
        self._lines: deque[bytes] = deque()
        self._n_bytes = 0
        self._ended = False
        self._discarding = False
        self._changed = threading.Condition()

    def put(self, line: bytes) -> None:
        """Add a line as soon as it fits; an empty queue accepts any line. See `discard_overflow`."""
        with self._changed:
            self._changed.wait_for(lambda: self._discarding or self._has_room(len(line)))
            if self._has_room(len(line)):
                self._lines.append(line)
                self._n_bytes += len(line)
                self._changed.notify_all()

    def get(self, timeout: float) -> bytes | None:
        """Return the next line, or None at the end. Raises TimeoutError after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._lines or self._ended, timeout):
                raise TimeoutError
            if not self._lines:
                return None
            line = self._lines.popleft()
            self._n_bytes -= len(line)
            self._changed.notify_all()
            return line

    def end(self) -> None:
        """Mark the end of the output; queued lines can still be read."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def discard_overflow(self) -> None:
        """From now on drop lines that do not fit, so that the writer never blocks again."""
        with self._changed:
            self._discarding = True
            self._changed.notify_all()

    def _has_room(self, n_bytes: int) -> bool:
        if not self._lines:
            return True
        return len(self._lines) < self._limit and self._n_bytes + n_bytes <= self._limit_bytes
