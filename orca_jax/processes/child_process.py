"""A child process: at the head of its own session, ended with all that it left there, and reaped once."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

LOOK_SECONDS = 0.03  # how soon an end is noticed
DEATH_SECONDS = 5.0  # from SIGKILL to the end; a process that a device holds may take longer


class ChildProcess:
    """One process. Its stdin and stdout are pipes, and `stderr` is as in subprocess.Popen.

    It is reaped here alone, so that no signal can go to another process that got its number. Whoever it has
    started and left in its process group ends with it. Raises OSError where it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> None:
        self.status: int | None = None  # as Popen's returncode
        self._lock = threading.Lock()
        self._popen = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches its parent alone
        )
        self.pid = self._popen.pid
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self.stdin = self._popen.stdin
        self.stdout = self._popen.stdout

    def kill(self) -> None:
        """SIGKILL, also to one that is stopped; nothing if it was reaped."""
        with self._lock:
            self._signal(signal.SIGKILL)

    def ask_to_end(self) -> None:
        """The end of its stdin, and SIGTERM; one that is stopped goes on to hear of it."""
        with self._lock:
            self.stdin.close()
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
                self.stdin.close()
            return True

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.status is None:
                os.killpg(self.pid, number)
