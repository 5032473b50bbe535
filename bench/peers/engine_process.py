"""An engine in a process of its own environment, behind a pipe of JSON lines (child.py is the other end)."""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from bench.peers.played import Played
from bench.trace import Trace

START_SECONDS, PLAY_SECONDS = 900.0, 1800.0
_ROOT = Path(__file__).parents[2]
_MOST_LINES = 4  # unread answers: one is asked for at a time


class EngineEnded(Exception):
    """An engine's process ended or did not answer in time; the message has the end of its stderr."""


class EngineProcess:
    """A context manager that ends the process. `about` is what the engine says of itself, after `start`."""

    def __init__(
        self,
        name: str,
        python: str,
        module: str,
        variables: Mapping[str, str] | None = None,
        *,
        play_seconds: float = PLAY_SECONDS,
    ) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        self._play_seconds = play_seconds
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed on exit)
        try:
            self._process = subprocess.Popen(
                [python, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                cwd=_ROOT,  # where `bench` is found
                env={**os.environ, **(variables or {})},
                start_new_session=True,  # an engine's own processes end with it
            )
        except OSError as error:
            self._stderr.close()
            raise EngineEnded(f"{name} did not start: {error}") from error
        self._lines: queue.Queue[str] = queue.Queue(_MOST_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)  # ends with the process
        self._reader.start()

    def start(self, flags: dict[str, Any], seconds: float = START_SECONDS) -> None:
        """Load the model; `about` is known then. Raises EngineEnded."""
        self.about = self._ask(flags, seconds)

    def play(self, trace: Trace) -> Played:
        """Play a trace once. Raises EngineEnded."""
        question = {
            "prompts": [request.prompt_ids for request in trace],
            "n_outputs": [request.n_output for request in trace],
            "arrivals": [request.arrival for request in trace],
        }
        answer = self._ask(question, self._play_seconds)
        return Played(
            seconds=answer["seconds"],
            latency=tuple(answer["latency"]),
            n_tokens=tuple(map(len, answer["token_ids"])),
            token_ids=tuple(map(tuple, answer["token_ids"])),
        )

    def warm_up(self, trace: Trace) -> Played:
        """Play a trace once, and have its tokens. Raises EngineEnded."""
        return self.play(trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._kill()  # what is left of it, and processes of its own
        self._reader.join(5)
        self._stderr.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                if line.startswith("{"):  # else a library's words while it was imported
                    self._lines.put(line)
        self._lines.put("")  # it has ended

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        # A thread, because a process that does not read would hold a long question for ever.
        writer = threading.Thread(target=self._write, args=(json.dumps(question) + "\n",), daemon=True)
        writer.start()
        try:
            line = self._lines.get(timeout=seconds)
            how = "ended"
        except queue.Empty:
            line, how = "", f"gave no answer within {seconds:g} seconds, and was killed"
        if not line:
            self._kill()
        writer.join(5)
        if not line:
            self._reader.join(5)
            size = os.fstat(self._stderr.fileno()).st_size
            said = os.pread(self._stderr.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")
            raise EngineEnded(f"{self.name} {how}:\n{said}")
        return json.loads(line)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:  # it has ended, which its reader tells
            pass

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # all have ended
            pass
        self._process.wait(30)
