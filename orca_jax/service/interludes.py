"""Interludes: work, such as an update of the weights, while no iteration is in flight.

The calling thread waits while the scheduler's thread brings the engine to rest, does the work and continues.
The scheduler and the engine are thus touched by that thread alone, as always.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from orca_jax.errors import ConfigError, EngineError, OrcaError, RequestsStillRunning, ServiceClosed
from orca_jax.request.request import FinishReason
from orca_jax.scheduling.recovery import Recovery
from orca_jax.scheduling.scheduler import Scheduler

# The fate of requests that have begun: finish first; stop here and continue afterwards; or end with the
# reason `cancelled`.
Running = Literal["finish", "continue", "abort"]
RUNNING: Sequence[Running] = ("finish", "continue", "abort")

_LOOK_SECONDS = 1.0  # how often a waiting thread checks whether the service is still running


class _Interlude:
    """A piece of work and its outcome."""

    def __init__(self, work: Callable[[], None], running: Running) -> None:
        self.work = work
        self.running: Running = running
        self.began = False  # set under the lock; work that has begun is always completed
        self.done = threading.Event()
        self.error: BaseException | None = None


class Interludes:
    """Brings the engine to rest and does work meanwhile.

    While the engine is `paused`, requests are accepted and wait. While it is `asleep` (level 1 or 2, else 0)
    it has no caches, and the service refuses new requests. `wake` wakes the scheduler's thread, and `stopped`
    returns why the service will do nothing more, or None while it runs.
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
        self._turn = threading.Lock()  # held by the thread that asked for the present interlude
        self._lock = threading.Lock()  # guards `_next` and its `began`
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

        `running` decides about requests that have begun; with "finish" all others wait meanwhile. `timeout`,
        in seconds, limits the time until the work begins.

        Raises RequestsStillRunning if requests did not finish in time. Raises the error of the work if it is
        an OrcaError other than EngineError. Both leave everything as it was. Any other error of the work is a
        failure of the engine. Raises ServiceClosed or EngineError if the service has ended or failed.
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
        # Work that has begun has no deadline here, because its waits have deadlines.
        while True:
            left = max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))
            if interlude.done.wait(_LOOK_SECONDS if interlude.began else left):
                return
            why = self._stopped()
            if why is not None:
                raise why
            with self._lock:
                if interlude.began or time.monotonic() < deadline:
                    continue
                self._next = None
            self._wake()
            n_begun = len(self._scheduler.begun())
            message = f"{n_begun} requests were still running after {timeout:g} seconds, and nothing was "
            message += 'changed; wait longer, or choose running="continue" or "abort"'
            raise RequestsStillRunning(message)

    # On the scheduler's thread.

    def look(self) -> None:
        """Set the scheduler's gate, and do the next interlude's work once the engine is at rest."""
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
        """Refuse the waiting interlude, because the service ends."""
        with self._lock:
            interlude, self._next = self._next, None
        if interlude is not None:
            interlude.error = ServiceClosed("the service was closed")
            interlude.done.set()

    def _do(self, interlude: _Interlude) -> None:
        with self._lock:
            if self._next is not interlude:
                return  # the waiting thread has given up
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
