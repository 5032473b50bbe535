"""Recovery from lost workers: the engine restarts and its requests resume, up to a number of times."""

import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol, runtime_checkable

from orca_jax.config import RestartBound
from orca_jax.errors import EngineError, WorkerLost
from orca_jax.scheduling.restart import run_again
from orca_jax.scheduling.scheduler import Scheduler


class LossWindow:
    """The losses of workers within the last `bound.seconds`, as every limit on restarts counts them.

    `len` is their number. Times are seconds of one monotonic clock.
    """

    def __init__(self, bound: RestartBound) -> None:
        self._bound = bound
        self._losses: deque[tuple[float, Collection[object]]] = deque()  # time, requests in flight

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, now: float, present: Collection[object] = ()) -> bool:
        """Count a loss while the requests `present` were in flight; False if it exceeds the bound."""
        while self._losses and self._losses[0][0] <= now - self._bound.seconds:
            self._losses.popleft()
        self._losses.append((now, present))
        return len(self._losses) <= self._bound.restarts

    def forgive(self, culprit: object) -> None:
        """Stop counting the losses at which the culprit was present."""
        self._losses = deque(loss for loss in self._losses if culprit not in loss[1])


@runtime_checkable
class RecoverableEngine(Protocol):
    """The additional methods of an Engine that can restart after WorkerLost."""

    def look(self) -> None:
        """Check for a lost worker, without waiting. Raises WorkerLost."""
        ...

    def recover(self, interrupted: Callable[[], bool]) -> bool:
        """Restart the engine with empty caches, within a deadline; False if interrupted before it is up.

        After an interruption the next call continues. After WorkerLost the next call starts over.
        """
        ...


class Recovery:
    """The scheduler's loop over an engine that may lose its workers, and statistics of the losses.

    `on_trouble`, if set, is called on the scheduler's thread with each loss after which the engine restarts,
    once the requests are ready to resume, and with None when the engine is up again. If the engine cannot
    restart, or has restarted too often, `step` raises EngineError. A request that causes losses is ended
    (quarantine.py), and all losses while it was in flight count as one against the limit on restarts.

    The statistics may be read from any thread. `losses` counts all losses, including those while the engine
    is down and the one that makes it fail. `n_blamed` counts the requests ended for causing losses,
    `recoveries` the times the engine came up again. An outage lasts from the first loss until the engine is
    up again, however many losses follow; `last_recovery_seconds` is the length of the last one, None before
    the first ends.
    """

    def __init__(
        self, scheduler: Scheduler, *, bound: RestartBound, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.on_trouble: Callable[[WorkerLost | None], None] | None = None
        self.losses = 0
        self.n_blamed = 0
        self.recoveries = 0
        self.last_recovery_seconds: float | None = None
        self._scheduler = scheduler
        engine = scheduler.engine
        self._engine = engine if isinstance(engine, RecoverableEngine) else None
        self._bound = bound
        self._clock = clock
        self._recent = LossWindow(bound)
        self._lost: WorkerLost | None = None
        # Seconds of all past outages, and when the current one began. One tuple, so that other threads read
        # both together.
        self._down: tuple[float, float | None] = (0.0, None)

    @property
    def recoverable(self) -> bool:
        """Whether the engine can restart after it loses a worker."""
        return self._engine is not None

    @property
    def trouble(self) -> str | None:
        """The stage lost last and how it was lost, while the engine is down; None while it is up."""
        return None if (lost := self._lost) is None else str(lost)

    @property
    def troubled_stage(self) -> int | None:
        """The stage lost last, counted from 0; None while the engine is up."""
        return None if (lost := self._lost) is None else lost.stage

    @property
    def down_seconds(self) -> float:
        """The total length of all outages, including the current one so far.

        It never decreases. After a permanent failure it keeps growing.
        """
        now = self._clock()  # before reading the tuple, or an outage ending in between counts too long
        seconds, since = self._down
        return seconds if since is None else seconds + max(0.0, now - since)

    def turn(self, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        """The function that takes one turn: the scheduler's own `step` if the engine cannot restart."""
        return self._scheduler.step if self._engine is None else partial(self.step, interrupted)

    def step(self, interrupted: Callable[[], bool]) -> bool:
        """Take a turn of the scheduler's loop, or of a restart; False if there was nothing to do.

        A restart returns early if `interrupted`, or if a request arrives or is asked to end. Raises
        EngineError if the engine has failed permanently. Only for an engine that can restart.
        """
        engine = self._engine
        assert engine is not None
        try:
            if self._lost is not None:
                return self._recover(engine, interrupted)
            worked = self._scheduler.step()
            if not worked:
                engine.look()
            return worked
        except WorkerLost as lost:
            self._record_loss(lost)
            return True

    def _recover(self, engine: RecoverableEngine, interrupted: Callable[[], bool]) -> bool:
        pool = self._scheduler.pool
        activity = pool.activity()
        ended = self._scheduler.end_cancelled()
        if not engine.recover(lambda: interrupted() or pool.activity() != activity):
            return ended
        now = self._clock()
        seconds, since = self._down
        assert since is not None
        self._down = (seconds + now - since, None)
        self.last_recovery_seconds = now - since
        self.recoveries += 1
        self._lost = None
        self._notify(None)
        return True

    def _record_loss(self, lost: WorkerLost) -> None:
        now = self._clock()
        self.losses += 1
        seconds, since = self._down
        self._down = (seconds, now if since is None else since)
        self._scheduler.timeline.interrupted(self._scheduler.pool.admitted(), "worker lost")
        present, culprit = run_again(self._scheduler, str(lost), lost.cause)
        if culprit is not None:
            self.n_blamed += 1
            self._recent.forgive(culprit)
        allowed = self._recent.add(now, present)
        self._lost = lost
        if not allowed:
            message = f"workers were lost {len(self._recent)} times within {self._bound.seconds:g} seconds, "
            message += f"and {self._bound.restarts} restarts are allowed; the last: {lost}"
            raise EngineError(message) from lost
        self._notify(lost)

    def _notify(self, lost: WorkerLost | None) -> None:
        if self.on_trouble is not None:
            self.on_trouble(lost)
