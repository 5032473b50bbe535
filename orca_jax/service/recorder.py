"""Records a service in a file of JSON lines, from which `orca replay` makes the same batches.

docs/serving.md describes the lines. They are formatted and written on a thread of their own. A recording
never harms serving: at its limit, or if the disk is full or too slow, it stops and serving continues.
"""

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from orca_jax.errors import ConfigError
from orca_jax.request.request import FinishReason, Request, Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.request_pool import InArrivalOrder, RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord, TimelineObserver
from orca_jax.service.iteration_lines import IterationLines

RECORDING_VERSION = 1

_POLL_SECONDS = 0.1  # between two writes
_CLOSE_SECONDS = 5.0
_MAX_WAITING = 1 << 24  # numbers in lines that are not written yet
_LINE = 16  # what a line counts in addition to the numbers in its lists
_CHUNK = 1 << 20  # bytes of one write
_LAST_LINE = 512  # bytes reserved for the last line
_DEFAULTS = SamplingParams()
_log = logging.getLogger(__name__)


class Recorder:
    """Writes one file. Methods other than `begin` and `close` are for the scheduler's thread, and never wait.

    `turn` counts the turns of the scheduler's loop; each begins by taking arrivals, and ends that users ask
    for, from the pool. `failure` says why the recording stopped early; None while it has not.
    """

    def __init__(self, path: str | Path, *, max_bytes: int) -> None:
        """Open the file. An existing one is renamed to PATH.old. Raises ConfigError."""
        self.path = Path(path)
        self.turn = -1
        self.failure: str | None = None
        self._room = max_bytes - _LAST_LINE
        self._max_bytes = max_bytes
        self._key = os.urandom(16)
        self._lines: deque[tuple[int, dict[str, Any]]] = deque()
        self._n_put = self._n_written = 0  # numbers; each is changed by one thread
        self._is_ended = threading.Event()
        try:
            if self.path.exists():
                if not self.path.is_file():
                    raise ConfigError(f"record is {str(path)!r}, which exists and is no file")
                os.replace(self.path, self.path.with_name(f"{self.path.name}.old"))
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            message = f"record is {str(path)!r}, a file that cannot be written: {error.strerror}"
            raise ConfigError(message) from error
        self._thread = threading.Thread(target=self._run, name="orca-recorder", daemon=True)

    def begin(self, header: Mapping[str, Any]) -> None:
        """Start the writer; `header` describes the engine."""
        self._put({"orca_recording": RECORDING_VERSION, **header})
        self._thread.start()

    def hidden(self, text: str) -> str:
        """A pseudonym for an API key or address: the same for the same text, but only in this file."""
        return text and blake2b(text.encode(), key=self._key, digest_size=8).hexdigest()

    def weighed(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Record owners' shares, before the first request; returns them by the owners' pseudonyms."""
        hidden = {self.hidden(owner): weight for owner, weight in weights.items()}
        self._put({"weights": hidden, "turn": self.turn}, len(hidden))
        return hidden

    def arrived(self, request: Request, at: float) -> None:
        """Record a request that the scheduler sees from this turn on; it entered the pool at `at` seconds."""
        line = {"arrived": request.arrival, "turn": self.turn, "time": at, "request": request}
        self._put(line, len(request.prompt_ids) + len(request.kind.scored_ids) + len(request.encoder_ids))

    def asked_to_end(self, request: Request, reason: FinishReason) -> None:
        """Record that the scheduler learns in this turn that a request is to end."""
        self._put({"ends": request.arrival, "turn": self.turn, "reason": reason})

    def returned(self, line: dict[str, Any]) -> None:
        """Record an iteration that returned in this turn; `line` is from IterationLines, with its `turn`."""
        self._put({**line, "returned_in": self.turn}, 2 * len(line["rows"]) + 2 * len(line["prefill"]))

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        """Record a request that has ended, for any reason."""
        line = {"finished": request.arrival, "turn": self.turn, "time": at, "reason": reason}
        self._put({**line, "output_of": request}, len(request.output_ids))

    def cannot_repeat(self, why: str) -> None:
        """Record that something happened in this turn that a replay of the arrivals cannot repeat."""
        self._put({"not_repeatable": why, "turn": self.turn})

    def close(self) -> None:
        """Write the remaining lines, unless the disk takes longer than some seconds."""
        self._is_ended.set()
        self._thread.join(_CLOSE_SECONDS)

    def _put(self, line: dict[str, Any], n_numbers: int = 0) -> None:
        if self.failure is not None:
            return
        n_numbers += _LINE
        if self._n_put + n_numbers - self._n_written > _MAX_WAITING:
            self._stop("the disk is too slow")
            return
        self._n_put += n_numbers
        self._lines.append((n_numbers, line))

    def _stop(self, why: str) -> None:
        self.failure = why
        _log.warning("the recording in %s ends here, and serving continues: %s", self.path, why)

    # On the writer's thread.

    def _run(self) -> None:
        try:
            while self.failure is None and not self._is_ended.wait(_POLL_SECONDS):
                self._write_lines()
            self._write_lines()
            last = {"closed": self.turn} if self.failure is None else {"stopped": self.failure}
            self._write(json.dumps(last).encode() + b"\n")
        except OSError as error:
            self._stop(f"the file cannot be written: {error.strerror}")
        except Exception as error:
            self._stop(f"{type(error).__name__}: {error}")
        finally:
            self._lines.clear()
            os.close(self._file)

    def _write_lines(self) -> None:
        chunk = bytearray()
        while self._lines:
            n_numbers, line = self._lines.popleft()
            text = json.dumps(self._plain(line), separators=(",", ":")).encode() + b"\n"
            if len(text) > self._room:
                self._stop(f"it has reached its limit of {self._max_bytes} bytes")
                self._lines.clear()
                break
            chunk += text
            self._room -= len(text)
            self._n_written += n_numbers
            if len(chunk) > _CHUNK:
                self._write(chunk)
                chunk.clear()
        self._write(chunk)

    def _write(self, data: bytes | bytearray) -> None:
        n_written = 0
        while n_written < len(data):
            n_written += os.write(self._file, data[n_written:])

    def _plain(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line as JSON has it. Made on the writer's thread, because it takes time."""
        request: Request | None = line.pop("request", None)
        if request is not None:
            given = {field.name: getattr(request.sampling, field.name) for field in fields(SamplingParams)}
            line["id"] = request.request_id
            line["n_input"] = request.n_input
            line["prompt"] = request.prompt_ids
            if request.kind.scored_ids:
                line["given"] = request.kind.scored_ids
            if request.pooling is not None:
                line["pooling"] = request.pooling
            if request.encoder_ids:
                line["encoder"] = request.encoder_ids
            line["max_tokens"] = request.max_tokens
            line["seed"] = request.seed
            line["sampling"] = {name: v for name, v in given.items() if v != getattr(_DEFAULTS, name)}
            line["owner"] = request.owner
            line["priority"] = request.priority
            line["salt"] = self.hidden("\n".join(request.cache_salt)) if any(request.cache_salt) else ""
        ended: Request | None = line.pop("output_of", None)
        if ended is not None:
            line["output"] = ended.final_ids
            if any(version for _, version in ended.weights_versions):
                line["weights_versions"] = ended.weights_versions
            if ended.logprobs:
                line["logprobs"] = [token.logprob for token in ended.logprobs]
        return line


class RecordedPool(RequestPool):
    """The request pool of a recorded service.

    Its scheduler sees arrivals, and ends that users ask for, only in `take_ending`, with which each turn of
    its loop begins. A turn then depends on nothing but the turns before it, and can be repeated.
    `disturbance` says what else has changed the scheduler since the start, such as a lost worker; "" if
    nothing has.
    """

    def __init__(self, recorder: Recorder, *, disturbance: Callable[[], str], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._recorder = recorder
        self._disturbance = disturbance
        self._is_disturbed = False
        self._unseen: list[tuple[Request, float]] = []
        self._asked: dict[Request, FinishReason] = {}

    def add(self, request: Request) -> None:
        request.owner = self._recorder.hidden(request.owner)  # shares go by owner, so it runs as recorded
        super().add(request)

    def take_ending(self) -> list[tuple[Request, FinishReason]]:
        with self._lock:
            if not self._is_disturbed and (why := self._disturbance()):
                self._is_disturbed = True
                self._recorder.cannot_repeat(why)
            self._recorder.turn += 1
            self._show_arrivals()
            for request, reason in self._asked.items():
                super()._ask_to_end(request, reason)
                self._recorder.asked_to_end(request, reason)
            self._asked.clear()
            return super().take_ending()

    def in_arrival_order(self) -> InArrivalOrder:
        if self._closed:  # all of them are to be ended, and those not seen yet too
            with self._lock:
                self._show_arrivals()
        return super().in_arrival_order()

    def remove(self, request: Request) -> None:
        with self._lock:
            self._asked.pop(request, None)
            super().remove(request)

    def _enter(self, request: Request, now: float) -> None:
        self._unseen.append((request, now))

    def _ask_to_end(self, request: Request, reason: FinishReason) -> bool:
        if request.ending is None and request not in self._asked:
            self._asked[request] = reason
            self._notify()
        return True

    def _show_arrivals(self) -> None:
        for request, at in self._unseen:
            super()._enter(request, at)
            self._recorder.arrived(request, at)
        self._unseen.clear()


class TimelineRecorder(TimelineObserver):
    """Records iterations and ends; RecordedPool records arrivals."""

    def __init__(self, recorder: Recorder, scheduler: Scheduler) -> None:
        self._recorder = recorder
        self._lines = IterationLines(scheduler)

    def issued(self, record: IterationRecord, rows: Sequence[Row]) -> None:
        self._lines.begin(record, rows)["turn"] = self._recorder.turn

    def returned(self, record: IterationRecord) -> None:
        line = self._lines.end(record)
        assert line is not None, "the recording began with the first iteration"
        self._recorder.returned(line)

    def ended(self, record: RequestRecord, request: Request) -> None:
        assert record.finished is not None and record.finish_reason is not None
        self._recorder.finished(request, record.finish_reason, record.finished)
