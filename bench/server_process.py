"""`orca serve` in a process of its own, on free ports, for measurements and for tests of the whole."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

_LISTENING = re.compile(r"^loading; (https?://\S+)/ready")
_GRPC = re.compile(r"^gRPC\s+(\S+:\d+)")
_READY = re.compile(r"^ready;")


class ServerProcess:
    """Starts with the context and is ended with it: SIGTERM, and SIGKILL if that takes longer than `patience`.

    `options` are those of `orca serve`; the ports are free ones unless they say otherwise. `url` and
    `grpc_address` are known when it is ready.
    """

    def __init__(self, *options: str, environ: dict[str, str] | None = None, patience: float = 60.0) -> None:
        self.url = ""
        self.grpc_address = ""
        self.stderr: deque[str] = deque(maxlen=10_000)  # lines
        self._options = options
        self._environ = {**os.environ, **(environ or {})}
        self._patience = patience
        self._listening = threading.Event()
        self._ready = threading.Event()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        ports: Sequence[str] = ("--port", "0", "--grpc-port", "0")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server.cli", "serve", *ports, *self._options],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name="stderr", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(self._patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(self._patience)
        self._reader.join(self._patience)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def wait_until_listening(self, timeout: float = 60.0) -> Self:
        """Wait until `url` is known: it answers from then on, though no model may be there yet."""
        return self._wait(self._listening, timeout)

    def wait_until_ready(self, timeout: float = 120.0) -> Self:
        """Wait until it takes requests. Raises RuntimeError, with what it wrote, if it ends or takes longer."""
        return self._wait(self._ready, timeout)

    def wait(self, timeout: float) -> int:
        """Wait for its end; returns its exit status. Raises subprocess.TimeoutExpired."""
        status = self.process.wait(timeout)
        self._ended.wait(timeout)
        return status

    def _wait(self, event: threading.Event, timeout: float) -> Self:
        deadline = time.monotonic() + timeout
        while not event.wait(0.05):
            if self._ended.is_set() or time.monotonic() > deadline:
                raise RuntimeError("the server did not come up:\n" + "".join(self.stderr))
        return self

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr.append(line)
            if listening := _LISTENING.match(line):
                self.url = listening[1]
                self._listening.set()
            elif grpc := _GRPC.match(line):
                self.grpc_address = grpc[1]
            elif _READY.match(line):
                self._ready.set()
        self._ended.set()
