"""A worker process under supervision, and the listener that reads its output."""

import os
import select
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO

from orca_jax.workers.child_process import DEATH_SECONDS, ChildProcess

_LISTENER_SECONDS = 0.2  # how soon a listener notices that the process has ended and left its pipe open
_PIPE_BYTES = 1 << 16  # may still be in the pipe when the process has ended
_MAX_LINE = 2000  # bytes
_LAST_LINES = 20


@dataclass(frozen=True)
class WorkerCommand:
    """The complete argv and environment of a stage's process; the environment may hold secrets."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)


class _Listener:
    """Reads a process's output line by line on its own thread; `last_lines` keeps the latest."""

    def __init__(self, pipe: IO[bytes], on_line: Callable[[str], None]) -> None:
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._pipe = pipe
        self._on_line = on_line
        self._line = b""  # up to _MAX_LINE + 1 bytes; the extra byte marks a cut line
        self._process_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="orca-worker-stderr", daemon=True)
        self._thread.start()

    def finish(self, seconds: float = 1.0) -> None:
        """Wait until all output of the ended process is read and the thread has ended."""
        self._process_ended.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        with self._pipe:
            number = self._pipe.fileno()
            poll = select.poll()
            poll.register(number, select.POLLIN)
            left = (
                _PIPE_BYTES  # limits reads after the end: a process that inherited the pipe may keep writing
            )
            while left > 0:
                ended = self._process_ended.is_set()
                if not poll.poll(_LISTENER_SECONDS * 1000):
                    if ended:
                        break
                    continue
                data = os.read(number, _PIPE_BYTES)
                if not data:
                    break
                left -= len(data) if ended else 0
                self._take(data)
        self._end_line()

    def _take(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._add(part)
            self._end_line()
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self._line += part[: _MAX_LINE + 1 - len(self._line)]

    def _end_line(self) -> None:
        text = self._line[:_MAX_LINE].decode(errors="replace").rstrip()
        cut = "..." if len(self._line) > _MAX_LINE else ""
        self._line = b""
        if text:
            self.last_lines.append(text + cut)
            self._on_line(text + cut)


class SupervisedProcess(ChildProcess):
    """A worker's process with a listener on its output. It exits when its stdin pipe closes."""

    def __init__(self, command: WorkerCommand, on_line: Callable[[str], None], started: float) -> None:
        self.started = started
        self.joined = False
        self.was_suspect = False  # the supervisor killed it
        super().__init__(command.arguments, environment=command.environment, stderr=subprocess.STDOUT)
        try:
            self.listener = _Listener(self.stdout, on_line)
        except BaseException:
            self.stdout.close()
            self.kill()
            self.reap(DEATH_SECONDS)
            raise
