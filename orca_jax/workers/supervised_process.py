"""One process of a worker as its supervisor holds it, and what it says."""

import os
import select
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO

from orca_jax.processes.child_process import DEATH_SECONDS, ChildProcess

_LISTENER_SECONDS = 0.2  # how soon a listener notices that the process has ended but its pipe has not
_PIPE_BYTES = 1 << 16  # what may still lie in a pipe when its process has ended
_MAX_LINE = 2000  # bytes
_LAST_LINES = 20


@dataclass(frozen=True)
class WorkerCommand:
    """The full argv and the full environment of a stage's process; the latter may hold secrets."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)


class _Listener:
    """Reads what a process says, line by line, on a thread of its own; the last lines are in `last`."""

    def __init__(self, pipe: IO[bytes], say: Callable[[str], None]) -> None:
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        self._pipe = pipe
        self._say = say
        self._line = b""  # one byte more than a line may have says that it was cut
        self._process_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="orca-worker-stderr", daemon=True)
        self._thread.start()

    def finish(self, seconds: float = 1.0) -> None:
        """The process has ended: wait until all that it said was read, and the thread has ended."""
        self._process_ended.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        with self._pipe:
            number = self._pipe.fileno()
            poll = select.poll()
            poll.register(number, select.POLLIN)
            left = _PIPE_BYTES  # for whoever has inherited the pipe may go on writing
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
            self.last.append(text + cut)
            self._say(text + cut)


class SupervisedProcess(ChildProcess):
    """A worker's process, listened to. It holds a pipe on stdin whose end tells it to exit."""

    def __init__(self, command: WorkerCommand, say: Callable[[str], None], started: float) -> None:
        self.started = started
        self.joined = False
        super().__init__(command.arguments, environment=command.environment, stderr=subprocess.STDOUT)
        try:
            self.listener = _Listener(self.stdout, say)
        except BaseException:
            self.stdout.close()
            self.kill()
            self.reap(DEATH_SECONDS)
            raise
