"""A child process in its own session: ended together with its process group, and reaped once."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

LOOK_SECONDS = 0.03  # interval of checks whether a process has ended
_LOW = 12  # a priority that gets 6 % of a processor beside one busy process; the least one, 1 %
DEATH_SECONDS = 5.0  # from SIGKILL to the end; a process blocked in a device driver may take longer


class ChildProcess:
    """One process. Its stdin and stdout are pipes; `stderr` is as in subprocess.Popen.

    Only this class reaps it, so no signal can reach another process that reuses its pid. When it ends, the
    processes left in its process group are killed. Raises OSError if the process cannot be started.
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
        self.was_stopped = False  # `reap` found it stopped, as by SIGSTOP; only its owner resets this
        self._lock = threading.Lock()
        self._popen = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches only its parent
        )
        self.pid = self._popen.pid
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self.stdin = self._popen.stdin
        self.stdout = self._popen.stdout

    def yield_processor(self) -> None:
        """Give it, and the threads that it starts from now on, the time that other processes leave.

        Linux shares the processor among sessions first, by a priority that each session has, and then among
        the processes of one. If memory runs out, this process is the first to be ended.
        """
        with self._lock, suppress(OSError):
            if self.status is None:
                os.setpriority(os.PRIO_PROCESS, self.pid, _LOW)
                Path(f"/proc/{self.pid}/oom_score_adj").write_text("1000")
                Path(f"/proc/{self.pid}/autogroup").write_text(str(_LOW))

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process; does nothing once it is reaped."""
        with self._lock:
            self._signal(signal.SIGKILL)

    def ask_to_end(self) -> None:
        """Close its stdin and send SIGTERM, and SIGCONT so that a stopped process receives it."""
        with self._lock:
            self.stdin.close()
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)

    def reap(self, seconds: float = 0.0) -> bool:
        """Wait up to `seconds` for its end; return whether it ended and set `status`."""
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
                        # Takes the report of a stop, or of its end.
                        if (
                            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
                            is not None
                        ):
                            self.was_stopped = True
                        return False
                except ChildProcessError:  # another part of the program reaped it; its status is lost
                    pass
                else:  # until `wait`, no other process or group can get its number
                    self._signal(signal.SIGKILL)
                self.status = self._popen.wait(DEATH_SECONDS)
                self.stdin.close()
            return True

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.status is None:
                os.killpg(self.pid, number)
