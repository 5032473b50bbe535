"""Runs `orca serve` or `orca route` as a child process, and reads its processor time from the system."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

_TREE = Path(__file__).parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")
_LISTENING = re.compile(r"^loading; (\S+)/ready ", re.MULTILINE)
_READY = re.compile(r"^ready; .*\ncurl .*\n", re.MULTILINE)
_HTTP = re.compile(r"^HTTP +(\S+)", re.MULTILINE)
_GRPC = re.compile(r"^gRPC +(\S+)", re.MULTILINE)


class ServerFailed(Exception):
    """The server failed to start or to end; the message has the end of its stderr."""


class OrcaProcess:
    """A command of `orca` that serves until it is ended; a context manager that ends it.

    It starts at once. Its stderr goes to a file, so that it never waits for a reader. `variables` are added
    to its environment, which has no other `ORCA_*`. `python` is the interpreter that runs it, and `tree` the
    source tree that it runs.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        python: str = sys.executable,
        tree: Path = _TREE,
    ) -> None:
        self._said = ""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed on exit)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ORCA_")}
        environment |= dict(variables or {})
        self._process = subprocess.Popen(
            [python, "-m", "server.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._file,
            cwd=tree,
            env=environment,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def stderr(self) -> str:
        """The text of stderr so far."""
        if self._file.closed:
            return self._said
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size, 0).decode(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the end; return the exit status. Raises ServerFailed if it still runs after `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"the server has not ended within {seconds:g} seconds") from None

    def cpu_seconds(self) -> float:
        """Processor time of all its threads since it began."""
        return cpu_seconds(self.pid)

    def stop(self, seconds: float = 60.0) -> int:
        """Send SIGTERM and wait; return the exit status. Raises ServerFailed after `seconds`."""
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def kill(self) -> None:
        """Kill the process; a second call does nothing."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
        self._said = self.stderr()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.stop()
        finally:
            self.kill()

    def wait_for(self, sign: re.Pattern[str], seconds: float) -> re.Match[str]:
        """Wait for text on stderr. Raises ServerFailed if the process ends or takes longer."""
        deadline = time.monotonic() + seconds
        while (found := sign.search(self.stderr())) is None:
            if self._process.poll() is not None:
                raise ServerFailed(
                    f"the server ended with {self._process.returncode}: {self.stderr()[-2000:]}"
                )
            if time.monotonic() > deadline:
                raise ServerFailed(f"not up within {seconds:g} seconds: {self.stderr()[-2000:]}")
            time.sleep(0.05)
        return found


class ServerProcess(OrcaProcess):
    """A server on free ports, unless the `flags` of `orca serve` say others.

    It is ready after `wait_until_ready`, when `url` and `grpc_address` are known. Programs are compiled when
    they are first needed, or with `compile_ahead` before it is ready.
    """

    def __init__(
        self,
        flags: Sequence[str] = (),
        *,
        variables: Mapping[str, str] | None = None,
        compile_ahead: bool = False,
        python: str = sys.executable,
        tree: Path = _TREE,
    ) -> None:
        self.url = ""
        self.grpc_address = ""
        compiling = {"ORCA_COMPILE_AHEAD": str(compile_ahead).lower(), "ORCA_READY_EARLY": "false"}
        super().__init__(
            ["serve", "--port", "0", "--grpc-port", "0", *flags],
            variables=compiling | dict(variables or {}),
            python=python,
            tree=tree,
        )

    @property
    def http_address(self) -> tuple[str, int]:
        """Host and port of HTTP."""
        return host_and_port(self.url)

    def wait_until_listening(self, seconds: float = 60.0) -> Self:
        """Wait until `url` is known and answers, though no model may be there yet. Raises ServerFailed."""
        self.url = self.wait_for(_LISTENING, seconds)[1]
        return self

    def wait_until_ready(self, seconds: float = 120.0) -> Self:
        """Wait until it accepts requests. Raises ServerFailed if it ends or takes longer."""
        self.wait_for(_READY, seconds)
        self.url = _found(_HTTP, self.stderr())
        self.grpc_address = _found(_GRPC, self.stderr())
        return self


def host_and_port(url: str) -> tuple[str, int]:
    """Host and port of an http URL."""
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process since it began."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    if match is None:
        raise ServerFailed(f"no address in what the server said: {text[-2000:]}")
    return match[1]
