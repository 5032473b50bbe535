"""One process of a worker as its supervisor holds it: started, listened to, signalled, reaped once."""

import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

LOOK_SECONDS = 0.03  # how soon an end is noticed
DEATH_SECONDS = 5.0  # from SIGKILL to the end; a process that a device holds may take longer

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


class SupervisedProcess:
    """One process, at the head of its own session. It holds a pipe on stdin whose end tells it to exit.

    It is reaped once, here, so that no signal can go to another that got its number. Whoever it has
    started and left in its process group ends with it.
    """

    def __init__(self, command: WorkerCommand, say: Callable[[str], None], started: float) -> None:
        self.started = started
        self.joined = False
        self.status: int | None = None  # as Popen's returncode
        self._lock = threading.Lock()
        self._popen = subprocess.Popen(
            command.arguments,
            env=command.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches the server alone
        )
        self.pid = self._popen.pid
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._stdin = self._popen.stdin
        try:
            self.listener = _Listener(self._popen.stdout, say)
        except BaseException:
            self._popen.stdout.close()
            self.kill()
            self.reap(DEATH_SECONDS)
            raise

    def kill(self) -> None:
        """SIGKILL, also to one that is stopped; nothing if it was reaped."""
        with self._lock:
            self._signal(signal.SIGKILL)

    def ask_to_end(self) -> None:
        """The end of its stdin, and SIGTERM; one that is stopped goes on to hear of it."""
        with self._lock:
            self._stdin.close()
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)

    def reap(self, seconds: float = 0.0) -> bool:
        """Whether it has ended within `seconds`; `status` is known then."""
        deadline = time.monotonic() + seconds
        while not self._reap_now():
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def _reap_now(self) -> bool:
        with self._lock:
            if self.status is None:
                try:
                    if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                        return False
                except ChildProcessError:  # reaped by another part of the program; its status is lost
                    pass
                else:  # until `wait`, nobody else can have its number, nor its group's
                    self._signal(signal.SIGKILL)
                self.status = self._popen.wait(DEATH_SECONDS)
                self._stdin.close()
            return True

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.status is None:
                os.killpg(self.pid, number)
