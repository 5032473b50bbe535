"""Writes log lines on a separate thread, so that a log reader who stops reading blocks nothing else.

A pipe holds 64 KiB. Once it is full a write blocks, and on the event loop every request would wait with it.
Here lines wait in a bounded queue. Lines beyond its bounds are dropped and counted, and the count is logged
once the reader continues.
"""

import io
import logging
import os
import select
import threading
from collections import deque

MOST_LINES, MOST_BYTES = 10_000, 8 << 20  # that wait


class LogWriter:
    """Lines for one file descriptor. `put` and `n_dropped` are for any thread and never wait."""

    def __init__(self, file: int, *, most_lines: int = MOST_LINES, most_bytes: int = MOST_BYTES) -> None:
        self._file = file
        self._most_lines, self._most_bytes = most_lines, most_bytes
        self._lines = deque[bytes]()
        self._n_bytes = 0  # that wait, with those that are being written
        self._n_unreported = 0  # dropped lines that no line has reported yet
        self._is_closing = False
        self._changed = threading.Condition()
        self.n_dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, text: str) -> None:
        """Write a text, or drop it if too much waits already."""
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if len(self._lines) >= self._most_lines or self._n_bytes + len(data) > self._most_bytes:
                self.n_dropped += 1
                self._n_unreported += 1
                return
            self._lines.append(data)
            self._n_bytes += len(data)
            if len(self._lines) == 1:  # otherwise the thread has been woken, and takes all lines
                self._changed.notify()

    def close(self, seconds: float) -> None:
        """Write what waits, for at most `seconds`, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._is_closing)
                if not self._lines:
                    return
                data = b"".join(self._lines)
                self._lines.clear()
                if self._n_unreported:
                    data += f"{self._n_unreported} log lines were dropped: nobody read them\n".encode()
                    self._n_unreported = 0
            if not self._write(data):
                return
            with self._changed:
                self._n_bytes = sum(map(len, self._lines))

    def _write(self, data: bytes) -> bool:
        """Write all of it; False if the file takes nothing any more."""
        view = memoryview(data)
        while view:
            try:
                # A pipe that select calls writable takes this much without waiting, also where others write
                # too.
                select.select([], [self._file], [])
                view = view[os.write(self._file, view[: select.PIPE_BUF]) :]
            except BlockingIOError:
                continue
            except (OSError, ValueError):  # the reader is gone
                return False
        return True


class LogHandler(logging.Handler):
    """A handler of the `logging` module that writes through a LogWriter."""

    def __init__(self, writer: LogWriter, form: str = "%(message)s") -> None:
        super().__init__()
        self._writer = writer
        self.setFormatter(logging.Formatter(form))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)


class LogStream(io.TextIOBase):
    """A text stream over a LogWriter, for what prints."""

    def __init__(self, writer: LogWriter, file: int) -> None:
        self._writer, self._file = writer, file

    def write(self, text: str, /) -> int:
        self._writer.put(text)
        return len(text)

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def fileno(self) -> int:
        return self._file

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "utf-8"
