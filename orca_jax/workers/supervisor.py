"""The supervisor of worker processes on a machine: starts, restarts (within a bound) and ends them."""

import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from orca_jax.config import RestartBound
from orca_jax.errors import EngineError, LossCause
from orca_jax.scheduling.recovery import LossWindow
from orca_jax.workers.child_process import DEATH_SECONDS, LOOK_SECONDS, ChildProcess
from orca_jax.workers.loss_cause import OomKills, ProcessState, cause_of_states

_LONGEST_DELAY = 10.0  # before a restart
_END_SECONDS = 2.0  # from the end of a worker's line to that of its process
_LISTENER_SECONDS = 0.2  # how soon a listener notices that the process has ended and left its pipe open
_PIPE_BYTES = 1 << 16  # may still be in the pipe when the process has ended
_MAX_LINE = 2000  # bytes
_LAST_LINES = 20
_USAGE_STATUS = 2  # exit status of a user's mistake, which a restart would only repeat
_USAGE_PREFIX = "orca: error: "  # starts the line that describes it


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


@dataclass(slots=True, eq=False)
class _Stage:
    number: int  # from 0
    command: WorkerCommand
    delay: float  # before the next restart, in seconds
    process: SupervisedProcess | None = None
    ended: SupervisedProcess | None = None  # since the stage was last ready
    start_at: float | None = None  # when to restart it


class Supervisor:
    """The processes of all stages of a pipeline on this machine.

    The supervisor restarts a process that ends. The first restart waits `delay_seconds`, and the delay
    doubles each time the process ends before it joins. Restarts stop, and `failure` says why, when more
    processes end before joining than `bound` allows (the engine master counts later losses), or when one ends
    before joining with status 2, a user's mistake. The other processes then run on until `close`.

    `on_event` receives every start and end and every line that a process writes to stdout or stderr, on
    several threads; it must not block, and its exceptions are dropped. Any thread may call any method, except
    that `on_event` must not call `close`.
    """

    def __init__(
        self,
        commands: Sequence[WorkerCommand],
        *,
        bound: RestartBound,
        on_event: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        delay_seconds: float = 0.5,
        patience_seconds: float = 300.0,
        grace_seconds: float = 5.0,
    ) -> None:
        self._stages = [_Stage(number, command, delay_seconds) for number, command in enumerate(commands)]
        self._bound = bound
        self._on_event = on_event
        self._clock = clock
        self._delay = delay_seconds
        self._patience = patience_seconds
        self._grace = grace_seconds
        self._losses = LossWindow(bound)  # counts processes that ended before they joined
        self._oom_kills = OomKills()
        self._failure: EngineError | None = None
        self._changed = threading.Condition()  # guards the stages and `_closing`; never held across a wait
        self._closing = False
        self._ending = threading.Lock()  # serializes `close`
        self._monitor = threading.Thread(target=self._run, name="orca-supervisor", daemon=True)

    def start(self) -> None:
        """Start every process. If one fails to start, end the others and raise EngineError."""
        assert not self._closing and self._monitor.ident is None
        try:
            for stage in self._stages:
                self._start(stage)
            self._monitor.start()
        except BaseException:
            self.close()
            raise

    def restart(self, stage: int) -> None:
        """Kill this stage's worker, which is suspect, and restart it, without blocking.

        Does nothing if the process has already ended, or if it has not joined and was started less than
        `patience_seconds` ago.
        """
        with self._changed:
            suspect = self._stages[stage]
            process = suspect.process
            if process is None or self._closing or self._failure is not None:
                return
            if process.joined or self._clock() - process.started >= self._patience:
                process.was_suspect = True
                process.kill()

    def joined(self, stage: int) -> None:
        """Note that this stage's current process is ready for an epoch."""
        # READY from a process that has just ended cannot count for the next one: the restart delay is longer.
        with self._changed:
            ready = self._stages[stage]
            ready.ended = None
            if ready.process is not None:
                ready.process.joined = True
                ready.process.was_stopped = False
                ready.delay = self._delay
        self._oom_kills.mark()

    def cause_of(self, stage: int, seen: LossCause) -> LossCause:
        """The cause of a loss, from how processes ended or were stopped since their stages were ready.

        If none did, the cause is `seen`. UNKNOWN means that this stage's line broke; then this waits up to
        two seconds for the end of the stage's process.
        """
        with self._changed:
            processes = [
                process
                for other in self._stages
                for process in (other.ended, other.process)
                if process is not None
            ]
            suspect = self._stages[stage].process
        for process in processes:
            process.reap()  # the monitor may not have looked yet; it still handles the end
        if seen is LossCause.UNKNOWN and suspect is not None and not suspect.was_stopped:
            suspect.reap(_END_SECONDS)
        states = [
            ProcessState(process.status, process.was_suspect, process.was_stopped) for process in processes
        ]
        return cause_of_states(states, seen=seen, for_memory=self._oom_kills.rose())

    def failure(self) -> EngineError | None:
        """Why the supervisor no longer restarts processes; None while it does."""
        return self._failure

    def pids(self) -> list[int | None]:
        """Each stage's process id; None between two processes."""
        with self._changed:
            return [None if stage.process is None else stage.process.pid for stage in self._stages]

    def close(self) -> None:
        """End all processes and threads: SIGTERM first, and SIGKILL after `grace_seconds`. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        with self._ending:
            if self._monitor.ident is not None:
                self._monitor.join(self._grace + DEATH_SECONDS)
            present = {stage: stage.process for stage in self._stages if stage.process is not None}
            try:
                for process in present.values():
                    process.ask_to_end()
                _reap_all(present.values(), self._grace)
            finally:
                for process in present.values():
                    process.kill()
                _reap_all(present.values(), DEATH_SECONDS)
                for stage, process in present.items():
                    self._report_end(stage, process)

    def _report_end(self, stage: _Stage, process: SupervisedProcess) -> None:
        name = f"stage {stage.number + 1}: its process (pid {process.pid})"
        if process.status is None:
            self._emit(f"{name} does not end; it was sent SIGKILL")
            return
        with self._changed:
            stage.process = None
        process.listener.finish()
        self._emit(f"{name} {_how(process.status)}")

    def _start(self, stage: _Stage) -> None:
        name = f"stage {stage.number + 1}"
        try:
            process = SupervisedProcess(
                stage.command, lambda line: self._emit(f"{name}: {line}"), started=self._clock()
            )
        except OSError as error:
            raise EngineError(f"{name}: its process cannot be started: {error}") from error
        with self._changed:
            stage.process = process
            stage.start_at = None
            closing = self._closing
        self._emit(f"{name}: its process (pid {process.pid}) was started")
        if closing:  # and `close` may not have seen it
            process.kill()
            process.reap(DEATH_SECONDS)
            self._report_end(stage, process)

    # On the monitor's thread.

    def _run(self) -> None:
        try:
            while self._wait():
                for stage in self._stages:
                    self._check(stage)
        except Exception as error:  # the engine must learn of any failure
            self._fail(f"the supervisor of the workers failed: {type(error).__name__}: {error}")

    def _wait(self) -> bool:
        """Wait until the next look at the processes; return False when the supervisor is closing."""
        with self._changed:
            return not (self._closing or self._changed.wait_for(lambda: self._closing, LOOK_SECONDS))

    def _check(self, stage: _Stage) -> None:
        process = stage.process
        if process is not None:
            if process.reap():
                with self._changed:
                    stage.process, stage.ended = None, process
                process.listener.finish()
                self._handle_end(stage, process)
        elif self._failure is None and stage.start_at is not None and self._clock() >= stage.start_at:
            try:
                self._start(stage)
            except EngineError as error:
                self._schedule_restart(stage, str(error), ())

    def _handle_end(self, stage: _Stage, process: SupervisedProcess) -> None:
        assert process.status is not None
        name = f"stage {stage.number + 1}"
        lines = tuple(process.listener.last_lines)
        suspect = "was suspect and " if process.was_suspect else ""
        end = f"its process (pid {process.pid}) {suspect}{_how(process.status)}"
        if self._failure is not None:
            self._emit(f"{name}: {end}")
        elif process.status == _USAGE_STATUS and not process.joined:
            self._emit(f"{name}: {end}")
            mistakes = [line.removeprefix(_USAGE_PREFIX) for line in lines if line.startswith(_USAGE_PREFIX)]
            self._fail(f"{name}: {mistakes[-1]}" if mistakes else f"{name}: {end}{_last(lines)}", lines)
        else:
            self._schedule_restart(stage, f"{name}: {end}", lines, counts=not process.joined)

    def _schedule_restart(
        self, stage: _Stage, end: str, lines: Sequence[str], *, counts: bool = True
    ) -> None:
        now = self._clock()
        if counts and not self._losses.add(now):
            self._emit(end)
            message = f"{end}; workers were restarted {len(self._losses) - 1} times within "
            message += f"{self._bound.seconds:g} seconds, and {self._bound.restarts} are allowed"
            self._fail(message + _last(lines), lines)
            return
        stage.start_at = now + stage.delay
        stage.delay = min(2 * stage.delay, max(_LONGEST_DELAY, self._delay))
        self._emit(f"{end}; restarting it")

    def _fail(self, message: str, lines: Sequence[str] = ()) -> None:
        failure = EngineError(message)
        if len(lines) > 1:
            failure.add_note("\n".join(("its last lines of output:", *lines)))
        self._failure = failure

    def _emit(self, event: str) -> None:
        with suppress(Exception):  # such as a closed terminal; the workers go on
            self._on_event(event)


def _reap_all(processes: Iterable[SupervisedProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.reap(max(0.0, deadline - time.monotonic()))


def _last(lines: Sequence[str]) -> str:
    return f"; its last line of output: {lines[-1]}" if lines else ""


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-status}"
