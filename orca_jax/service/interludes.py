"""Interludes: work between two iterations, such as new weights, while none is in flight.

One thread asks for an interlude and waits; the scheduler's thread brings the engine to rest, does the work
and continues. So only that thread touches the scheduler and the engine, as always.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from orca_jax.errors import (
    ConfigError,
    EngineError,
    OrcaError,
    RequestsStillRunning,
    ServiceClosed,
)
from orca_jax.request.request import FinishReason
from orca_jax.scheduling.recovery import Recovery
from orca_jax.scheduling.scheduler import Scheduler

# What happens to requests that have begun: they finish first; they stop here and continue afterwards; or they
# end with the reason `cancelled`.
Running = Literal["finish", "continue", "abort"]
RUNNING: Sequence[Running] = ("finish", "continue", "abort")

_LOOK_SECONDS = 1.0  # a waiting thread checks this often whether the service is still running


class _Interlude:
    """One piece of work, and its outcome."""

    def __init__(self, work: Callable[[], None], running: Running) -> None:
        self.work = work
        self.running: Running = running
        self.began = False  # under the lock: from then on it is completed
        self.done = threading.Event()
        self.error: BaseException | None = None


class Interludes:
    """Brings the engine to rest, and does work while it rests.

    While it is `paused`, requests are accepted and wait. While it is `asleep` (level 1 or 2, else 0) it has
    no caches, and the service refuses new requests. `wake` wakes the scheduler's thread, and `stopped` says
    why the service will do nothing more, or None while it runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        recovery: Recovery,
        *,
        wake: Callable[[], None],
        stopped: Callable[[], EngineError | None],
    ) -> None:
        self.active = False  # whether `look` has anything to do; most turns of the scheduler skip it
        self.paused = False
        self.asleep = 0
        self._scheduler = scheduler
        self._recovery = recovery
        self._wake = wake
        self._stopped = stopped
        self._turn = threading.Lock()  # held by the thread whose interlude it is
        self._lock = threading.Lock()  # for the next one, and its `began`
        self._next: _Interlude | None = None

    # For any thread but the scheduler's.

    @property
    def busy(self) -> bool:
        """Whether an interlude is under way."""
        return self._turn.locked()

    def pause(self, *, running: Running, timeout: float) -> None:
        """Issue no more iterations until `resume`. Raises as `run` does."""

        def work() -> None:
            self.paused = True

        self.run(work, running=running, timeout=timeout)

    def resume(self) -> None:
        """End a pause; nothing happens if there is none."""
        self.paused = False
        self._wake()

    def run(self, work: Callable[[], None], *, running: Running, timeout: float) -> None:
        """Do `work` on the scheduler's thread while no iteration is in flight; wait until it is done.

        `running` says what becomes of requests that have begun. With "finish" all others wait meanwhile.
        `timeout`, in seconds, limits the time until the work begins.

        Raises RequestsStillRunning if requests did not finish in time, and the error of the work if it is an
        OrcaError that is no EngineError; both leave everything as it was. Any other error of the work is the
        engine's failure. Raises ServiceClosed, or EngineError if the engine has failed or was closed before.
        """
        if running not in RUNNING:
            raise ConfigError(f"running is {running!r}; it must be one of {', '.join(RUNNING)}")
        deadline = time.monotonic() + timeout
        if not self._turn.acquire(timeout=max(0.0, timeout)):
            raise RequestsStillRunning(f"another change was not done within {timeout:g} seconds; try again")
        try:
            interlude = _Interlude(work, running)
            with self._lock:
                self._next = interlude
                self.active = True
            self._wake()
            self._wait(interlude, deadline, timeout)
            if interlude.error is not None:
                raise interlude.error
        finally:
            self._turn.release()

    def _wait(self, interlude: _Interlude, deadline: float, timeout: float) -> None:
        # Work that has begun has no deadline here: its own waits have.
        while not interlude.done.wait(_LOOK_SECONDS if interlude.began else self._left(deadline)):
            why = self._stopped()
            if why is not None:
                raise why
            with self._lock:
                if interlude.began or time.monotonic() < deadline:
                    continue
                self._next = None
            self._wake()
            message = (
                f"{len(self._scheduler.begun())} requests were still running after {timeout:g} seconds, "
            )
            raise RequestsStillRunning(
                message + 'and nothing was changed; wait longer, or choose running="continue" or "abort"'
            )

    # On the scheduler's thread.

    def look(self) -> None:
        """Set the scheduler's gate, and do the work that is asked for once the engine is at rest."""
        while True:
            interlude = self._next
            scheduler = self._scheduler
            if interlude is None:
                with self._lock:
                    self.active = self._next is not None or self.paused or self.asleep > 0
                scheduler.gate = "shut" if self.paused or self.asleep else "open"
                return
            if interlude.running == "finish":
                begun = scheduler.begun()
                if begun and (self.paused or self.asleep):
                    self._refuse(interlude, len(begun))
                    continue
                scheduler.gate = "begun"
                at_rest = not (begun or scheduler.n_scheduled)
            else:
                scheduler.gate = "shut"
                at_rest = not scheduler.n_scheduled
                if interlude.running == "abort":
                    for request in scheduler.begun():
                        scheduler.pool.end(request, FinishReason.CANCELLED)
            if not at_rest or self._recovery.trouble is not None:
                return
            scheduler.end_cancelled()
            self._do(interlude)

    def close(self) -> None:
        """The service ends: nothing that is asked for from now on is done."""
        with self._lock:
            interlude, self._next = self._next, None
        if interlude is not None:
            interlude.error = ServiceClosed("the service was closed")
            interlude.done.set()

    def _do(self, interlude: _Interlude) -> None:
        with self._lock:
            if self._next is not interlude:
                return  # it came too late
            self._next = None
            interlude.began = True
        try:
            interlude.work()
        except BaseException as error:
            interlude.error = error
            if not isinstance(error, OrcaError) or isinstance(error, EngineError):
                raise
        finally:
            interlude.done.set()

    def _refuse(self, interlude: _Interlude, n_begun: int) -> None:
        with self._lock:
            if self._next is interlude:
                self._next = None
        interlude.error = RequestsStillRunning(
            f"the engine is paused in the middle of {n_begun} requests, so they cannot finish; resume "
            'it first, or choose running="continue" or "abort"'
        )
        interlude.done.set()

    @staticmethod
    def _left(deadline: float) -> float:
        return max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))
