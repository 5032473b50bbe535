"""Starts the workers' processes on one machine, starts lost ones again within bounds, and ends them all."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from orca_jax.config import RestartBound
from orca_jax.errors import EngineError
from orca_jax.processes.child_process import DEATH_SECONDS, LOOK_SECONDS
from orca_jax.scheduling.loss_window import LossWindow
from orca_jax.workers.supervised_process import SupervisedProcess, WorkerCommand

_LONGEST_DELAY = 10.0  # before a restart
_MISTAKE_STATUS = 2  # of an exit: the user's mistake, which another start would only repeat
_MISTAKE = "orca: error: "  # how its line begins


def _ignore(_: str) -> None:
    pass


@dataclass(slots=True, eq=False)
class _Stage:
    number: int  # from 0
    command: WorkerCommand
    delay: float  # before the next restart, in seconds
    process: SupervisedProcess | None = None
    given_up: bool = False  # this process, by `restart`
    start_at: float | None = None  # when it is to be started again


class Supervisor:
    """The processes of all stages of a pipeline on this machine.

    A process that ends is started again: after `delay_seconds`, and twice as long each time that it ends
    before it has joined. `failure` says why no process is started any more: more ended before they had joined
    than `bound` allows (those that end later are the engine master's to count), or one ended with status 2, a
    user's mistake, before it joined; the others go on until `close`. `on_event` hears of every start and end
    and of each line that a process writes to stdout or stderr, on several threads; it should not wait, and
    what it raises is dropped. All methods are for any thread, but not for `on_event` to call `close`.
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
        self._losses = LossWindow(bound)  # of processes that had not joined
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
                    self._take_leave(stage, process)

    def _take_leave(self, stage: _Stage, process: SupervisedProcess) -> None:
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
            process = SupervisedProcess(
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
            process.reap(DEATH_SECONDS)
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
            return not (self._closing or self._changed.wait_for(lambda: self._closing, LOOK_SECONDS))

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

    def _take_end(self, stage: _Stage, process: SupervisedProcess) -> None:
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
            self._start_later(stage, f"{name}: {end}", words, counts=not process.joined)

    def _start_later(self, stage: _Stage, end: str, words: Sequence[str], *, counts: bool = True) -> None:
        now = self._clock()
        if counts and not self._losses.add(now):
            self._tell(end)
            message = f"{end}; workers were started again {len(self._losses) - 1} times within "
            message += f"{self._bound.seconds:g} seconds, and {self._bound.restarts} are allowed"
            self._fail(message + _last(words), words)
            return
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


def _reap_all(processes: Iterable[SupervisedProcess], seconds: float) -> None:
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
