"""Starts the workers' processes on one machine, starts lost ones again within bounds, and ends them all."""

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
from orca_jax.errors import EngineError

_LOOK_SECONDS = 0.03  # how soon an end is noticed
_LISTENER_SECONDS = 0.2  # how soon a listener notices that the process has ended but its pipe has not
_DEATH_SECONDS = 5.0  # from SIGKILL to the end; a process that a device holds may take longer
_LONGEST_DELAY = 10.0  # before a restart
_PIPE_BYTES = 1 << 16  # what may still lie in a pipe when its process has ended
_MAX_LINE = 2000  # bytes
_LAST_LINES = 20
_MISTAKE_STATUS = 2  # of an exit: the user's mistake, which another start would only repeat
_MISTAKE = "orca: error: "  # how its line begins


@dataclass(frozen=True)
class WorkerCommand:
    """The full argv and the full environment of a stage's process; the latter may hold secrets."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)


def _ignore(_: str) -> None:
    pass


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


class _Process:
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
            self.reap(_DEATH_SECONDS)
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
            time.sleep(_LOOK_SECONDS)
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
                self.status = self._popen.wait(_DEATH_SECONDS)
                self._stdin.close()
            return True

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.status is None:
                os.killpg(self.pid, number)


@dataclass(slots=True, eq=False)
class _Stage:
    number: int  # from 0
    command: WorkerCommand
    delay: float  # before the next restart, in seconds
    process: _Process | None = None
    given_up: bool = False  # this process, by `restart`
    start_at: float | None = None  # when it is to be started again


class Supervisor:
    """The processes of all stages of a pipeline on this machine.

    A process that ends is started again: after `delay_seconds`, and twice as long each time that it ends
    before it has joined. `failure` says why no process is started any more: there were more restarts than
    `bound` allows, or one ended with status 2, a user's mistake, before it joined; the others go on until
    `close`. `on_event` hears of every start and end and of each line that a process writes to stdout or
    stderr, on several threads; it should not wait, and what it raises is dropped. All methods are for any
    thread, but not for `on_event` to call `close`.
    """

    def __init__(
        self,
        commands: Sequence[WorkerCommand],
        *,
        bound: RestartBound,
        on_event: Callable[[str], None] = _ignore,
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
        self._restarts: deque[float] = deque()  # when they were, within the bound's seconds
        self._failure: EngineError | None = None
        self._changed = threading.Condition()  # for the stages and `_closing`; never held while one waits
        self._closing = False
        self._ending = threading.Lock()  # one `close` after the other
        self._monitor = threading.Thread(target=self._run, name="orca-supervisor", daemon=True)

    def start(self) -> None:
        """Start every process. Raises EngineError if one cannot be, and ends the others."""
        assert not self._closing and self._monitor.ident is None
        try:
            for stage in self._stages:
                self._start(stage)
            self._monitor.start()
        except BaseException:
            self.close()
            raise

    def restart(self, stage: int) -> None:
        """The worker of this stage cannot be relied on any more: kill it and start it anew, without waiting.

        Nothing if it has ended already, or was started anew since it joined: one that is still on its way is
        left in peace for `patience_seconds`.
        """
        with self._changed:
            its = self._stages[stage]
            process = its.process
            if process is None or self._closing or self._failure is not None:
                return
            if process.joined or self._clock() - process.started >= self._patience:
                its.given_up = True
                process.kill()

    def joined(self, stage: int) -> None:
        """This stage's present process has answered that it is ready for an epoch."""
        # READY of a process that ended right after it comes before the next is started: there is a pause.
        with self._changed:
            its = self._stages[stage]
            if its.process is not None:
                its.process.joined = True
                its.delay = self._delay

    def failure(self) -> EngineError | None:
        """Why lost processes are not started any more; None while they are."""
        return self._failure

    def pids(self) -> list[int | None]:
        """Each stage's process; None where there is none at the moment."""
        with self._changed:
            return [None if stage.process is None else stage.process.pid for stage in self._stages]

    def close(self) -> None:
        """End all processes and threads: in order within `grace_seconds`, or else by SIGKILL.

        Nothing the second time.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        with self._ending:
            if self._monitor.ident is not None:
                self._monitor.join(self._grace + _DEATH_SECONDS)
            present = {stage: stage.process for stage in self._stages if stage.process is not None}
            try:
                for process in present.values():
                    process.ask_to_end()
                _reap_all(present.values(), self._grace)
            finally:
                for process in present.values():
                    process.kill()
                _reap_all(present.values(), _DEATH_SECONDS)
                for stage, process in present.items():
                    self._take_leave(stage, process)

    def _take_leave(self, stage: _Stage, process: _Process) -> None:
        name = f"stage {stage.number + 1}: its process (pid {process.pid})"
        if process.status is None:
            self._tell(f"{name} cannot be ended; it was sent SIGKILL")
            return
        with self._changed:
            stage.process = None
        process.listener.finish()
        self._tell(f"{name} {_how(process.status)}")

    def _start(self, stage: _Stage) -> None:
        name = f"stage {stage.number + 1}"
        try:
            process = _Process(
                stage.command, lambda line: self._tell(f"{name}: {line}"), started=self._clock()
            )
        except OSError as error:
            raise EngineError(f"{name}: its process cannot be started: {error}") from error
        with self._changed:
            stage.process = process
            stage.given_up = False
            stage.start_at = None
            closing = self._closing
        self._tell(f"{name}: its process (pid {process.pid}) was started")
        if closing:  # and `close` may not have seen it
            process.kill()
            process.reap(_DEATH_SECONDS)
            self._take_leave(stage, process)

    # On the monitor's thread.

    def _run(self) -> None:
        try:
            while self._wait():
                for stage in self._stages:
                    self._look_after(stage)
        except Exception as error:  # whatever it is, the engine must hear of it
            self._fail(f"the supervisor of the workers failed: {type(error).__name__}: {error}")

    def _wait(self) -> bool:
        """Until it is time to look again; False when the supervisor is closed."""
        with self._changed:
            return not (self._closing or self._changed.wait_for(lambda: self._closing, _LOOK_SECONDS))

    def _look_after(self, stage: _Stage) -> None:
        process = stage.process
        if process is not None:
            if process.reap():
                with self._changed:
                    stage.process = None
                process.listener.finish()
                self._take_end(stage, process)
        elif self._failure is None and stage.start_at is not None and self._clock() >= stage.start_at:
            try:
                self._start(stage)
            except EngineError as error:
                self._start_later(stage, str(error), ())

    def _take_end(self, stage: _Stage, process: _Process) -> None:
        assert process.status is not None
        name = f"stage {stage.number + 1}"
        words = tuple(process.listener.last)
        given_up = "was given up and " if stage.given_up else ""
        end = f"its process (pid {process.pid}) {given_up}{_how(process.status)}"
        if self._failure is not None:
            self._tell(f"{name}: {end}")
        elif process.status == _MISTAKE_STATUS and not process.joined:
            self._tell(f"{name}: {end}")
            said = [line.removeprefix(_MISTAKE) for line in words if line.startswith(_MISTAKE)]
            self._fail(f"{name}: {said[-1]}" if said else f"{name}: {end}{_last(words)}", words)
        else:
            self._start_later(stage, f"{name}: {end}", words)

    def _start_later(self, stage: _Stage, end: str, words: Sequence[str]) -> None:
        now = self._clock()
        while self._restarts and self._restarts[0] <= now - self._bound.seconds:
            self._restarts.popleft()
        if len(self._restarts) >= self._bound.restarts:
            self._tell(end)
            message = f"{end}; workers were started again {len(self._restarts)} times within "
            message += f"{self._bound.seconds:g} seconds, and {self._bound.restarts} are allowed"
            self._fail(message + _last(words), words)
            return
        self._restarts.append(now)
        stage.start_at = now + stage.delay
        stage.delay = min(2 * stage.delay, max(_LONGEST_DELAY, self._delay))
        self._tell(f"{end}; starting it again")

    def _fail(self, message: str, words: Sequence[str] = ()) -> None:
        failure = EngineError(message)
        if len(words) > 1:
            failure.add_note("\n".join(("the last lines that it wrote:", *words)))
        self._failure = failure

    def _tell(self, event: str) -> None:
        with suppress(Exception):  # such as a terminal that is gone; the workers are none the worse
            self._on_event(event)


def _reap_all(processes: Iterable[_Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.reap(max(0.0, deadline - time.monotonic()))


def _last(words: Sequence[str]) -> str:
    return f"; its last words: {words[-1]}" if words else ""


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-status}"
