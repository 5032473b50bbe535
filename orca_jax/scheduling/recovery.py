"""After the loss of a worker: requests run again, the engine is brought up again, and both within bounds."""

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from orca_jax.config import RestartBound
from orca_jax.errors import EngineError, WorkerLost
from orca_jax.scheduling.loss_window import LossWindow
from orca_jax.scheduling.scheduler import Scheduler


@runtime_checkable
class RecoverableEngine(Protocol):
    """What an engine has that can go on after WorkerLost, beside the methods of Engine."""

    def look(self) -> None:
        """See whether a worker is lost, without waiting. Raises WorkerLost."""
        ...

    def recover(self, interrupted: Callable[[], bool]) -> bool:
        """Bring the engine up again with empty caches, within a deadline; False if interrupted before.

        The next call goes on then. Raises WorkerLost; the next call begins anew.
        """
        ...


class Recovery:
    """The scheduler's loop over an engine that may lose its workers, and what became of the losses.

    `on_trouble`, if it is set, hears of each loss that the engine is to be brought up after, when its
    requests stand ready to run again, and with None when it is up; on the scheduler's thread. An engine that
    cannot be brought up again, or was too often, has its EngineError raised, as without this. A request that
    is found to be the cause of losses is ended (quarantine.py), and all losses that it cost count as one.

    The figures may be read on any thread. `losses` counts all losses: those while the engine was down
    already, and the last one of an engine that failed. `n_blamed` counts the requests that were ended as
    their cause, `recoveries` how often the engine came up again. It is down from a loss until it is up again,
    however many losses lie between: `last_recovery_seconds` is how long that was the last time, None before
    the first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        bound: RestartBound,
        clock: Callable[[], float] = time.monotonic,
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
        # Seconds of all times it was down and came up, and since when it is down now. One tuple, so that
        # another thread never sees one without the other.
        self._down: tuple[float, float | None] = (0.0, None)

    @property
    def recoverable(self) -> bool:
        """Whether the engine is one that can lose workers and be brought up again."""
        return self._engine is not None

    @property
    def trouble(self) -> str | None:
        """Which stage was lost last and how, while the engine is down; None while it works."""
        lost = self._lost
        return None if lost is None else str(lost)

    @property
    def troubled_stage(self) -> int | None:
        """That stage, counted from 0."""
        lost = self._lost
        return None if lost is None else lost.stage

    @property
    def down_seconds(self) -> float:
        """For how long the engine has been down, all times together, this one so far included.

        It never falls. Of an engine that failed for good after a loss it goes on growing.
        """
        now = self._clock()  # before the look at the tuple, or this could be above what it is in the end
        seconds, since = self._down
        return seconds if since is None else seconds + max(0.0, now - since)

    def step(self, interrupted: Callable[[], bool]) -> bool:
        """One turn of the scheduler's loop, or of bringing the engine up; False when there was nothing to do.

        The latter is left when `interrupted`, and to end requests that were asked to. Raises EngineError when
        the engine has failed for good.
        """
        engine = self._engine
        if engine is None:
            return self._scheduler.step()
        try:
            if self._lost is not None:
                return self._recover(engine, interrupted)
            worked = self._scheduler.step()
            if not worked:
                engine.look()
            return worked
        except WorkerLost as lost:
            self._take_loss(lost)
            return True

    def _recover(self, engine: RecoverableEngine, interrupted: Callable[[], bool]) -> bool:
        pool = self._scheduler.pool
        seen = pool.activity()
        ended = self._scheduler.end_asked()
        if not engine.recover(lambda: interrupted() or pool.activity() != seen):
            return ended
        now = self._clock()
        seconds, since = self._down
        assert since is not None
        self._down = (seconds + now - since, None)
        self.last_recovery_seconds = now - since
        self.recoveries += 1
        self._lost = None
        self._tell(None)
        return True

    def _take_loss(self, lost: WorkerLost) -> None:
        now = self._clock()
        self.losses += 1
        seconds, since = self._down
        self._down = (seconds, now if since is None else since)
        present, guilty = self._scheduler.run_again(str(lost))
        if guilty is not None:
            self.n_blamed += 1
            self._recent.forgive(guilty)
        allowed = self._recent.add(now, present)
        self._lost = lost
        if not allowed:
            message = (
                f"workers were lost {len(self._recent)} times within {self._bound.seconds:g} seconds, and "
            )
            message += f"{self._bound.restarts} restarts are allowed; the last: {lost}"
            raise EngineError(message) from lost
        self._tell(lost)

    def _tell(self, lost: WorkerLost | None) -> None:
        if self.on_trouble is not None:
            self.on_trouble(lost)
