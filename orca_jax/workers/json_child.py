"""A child process that reads and writes lines of JSON, with a deadline for each answer."""

import json
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

from orca_jax.workers.child_process import DEATH_SECONDS, ChildProcess

LIMIT_LINES = 4096
LIMIT_BYTES = 256 << 20  # a benchmark's answer may hold millions of numbers
_TAIL_BYTES = 4000
_READER_SECONDS = 5.0


class LineQueue:
    """A FIFO of a child's output lines, at most `limit` and `limit_bytes`, for one writer and one reader.

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


class ChildSilent(Exception):
    """A child gave no answer in time, or too long a line, and was killed."""


class JsonChild:
    """A process whose answers are the lines of its stdout that hold a JSON object; a context manager.

    Its other lines go to `on_other`. Its stderr is kept for `last_words`, or with `keep_stderr=False` goes to
    this process's stderr. `close` closes the child's stdin and gives it `grace_seconds` to end by itself.
    Unread output is bounded: a child that writes more blocks until `receive`, `wait` or `close`. With
    `yields` it runs only when other processes leave time. For use by one thread, except `kill`. Raises
    OSError if the process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        keep_stderr: bool = True,
        on_other: Callable[[str], object] = lambda line: None,
        grace_seconds: float = 0.0,
        yields: bool = False,
    ) -> None:
        self._on_other = on_other
        self._grace = grace_seconds
        self._stderr = tempfile.TemporaryFile() if keep_stderr else None  # noqa: SIM115 (closed by `close`)
        try:
            self._process = ChildProcess(command, environment=environment, folder=folder, stderr=self._stderr)
        except BaseException:
            self._close_stderr()
            raise
        if yields:
            self._process.yield_processor()
        self._lines = LineQueue()
        self._line_too_long = False
        self._writers: list[threading.Thread] = []
        self._reader = threading.Thread(target=self._read, name="orca-child-stdout", daemon=True)
        self._reader.start()

    def send(self, question: Mapping[str, Any], *, last: bool = False) -> None:
        """Send a line without waiting for it to be read; closes the child's stdin after the last one."""
        line = json.dumps(question).encode() + b"\n"
        # A thread, because writing a long question blocks while the process does not read.
        writer = threading.Thread(target=self._write, args=(line, last), name="orca-child-stdin", daemon=True)
        self._writers.append(writer)
        writer.start()

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return its next answer, or None when it has ended.

        Raises ChildSilent, and kills the child, after `seconds` or a line above LIMIT_BYTES.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                self._process.kill()
                raise ChildSilent(f"no answer within {seconds:g} seconds") from None
            if line is None:
                if self._line_too_long:
                    raise ChildSilent(f"a line of its output has more than {LIMIT_BYTES} bytes")
                return None
            try:
                answer = json.loads(line)
            except ValueError:
                answer = None
            if isinstance(answer, dict):
                return cast("dict[str, Any]", answer)
            self._on_other(line.decode(errors="replace").rstrip("\n"))

    def ask(
        self, question: Mapping[str, Any], seconds: float, *, last: bool = False
    ) -> dict[str, Any] | None:
        self.send(question, last=last)
        return self.receive(seconds)

    def wait(self, seconds: float) -> int | None:
        """Wait for its end and return its status; drops output that the queue has no room for.

        Kills it after `seconds`, and returns None if that does not end it either.
        """
        self._lines.discard_overflow()
        if not self._process.reap(seconds):
            self._process.kill()
            self._process.reap(DEATH_SECONDS)
        return self._process.status

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it at once, so that `receive` on another thread returns; from any thread."""
        self._process.kill()

    def last_words(self) -> str:
        """The end of its output on stderr so far."""
        if self._stderr is None:
            return ""
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return tail.decode(errors="replace")

    def how_it_ended(self, seconds: float) -> str:
        """Wait as in `wait`; return "ended with status N: " and the last line of its stderr."""
        status = self.wait(seconds)
        lines = self.last_words().strip().splitlines() or ["it printed no error"]
        return f"ended with status {status}: {lines[-1][:300]}"

    def close(self) -> None:
        """End it and its process group. Idempotent."""
        self._lines.discard_overflow()
        if not any(writer.is_alive() for writer in self._writers):  # otherwise it does not read its stdin
            with suppress(OSError):
                self._process.stdin.close()
            self._process.reap(self._grace)
        self.wait(0.0)
        self._reader.join(_READER_SECONDS)
        for writer in self._writers:
            writer.join(_READER_SECONDS)
        self._close_stderr()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        with self._process.stdout as pipe, open(pipe.fileno(), "rb", closefd=False) as lines:
            while line := lines.readline(LIMIT_BYTES + 1):
                if len(line) > LIMIT_BYTES:
                    self._line_too_long = True
                    self._process.kill()
                    break
                self._lines.put(line)
        self._lines.end()

    def _write(self, line: bytes, last: bool) -> None:
        with suppress(OSError, ValueError):  # it has ended, which its reader reports
            view = memoryview(line)
            while view:
                view = view[self._process.stdin.write(view) :]
            if last:
                self._process.stdin.close()

    def _close_stderr(self) -> None:
        if self._stderr is not None:
            self._stderr.close()
