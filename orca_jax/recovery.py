"""After the loss of a worker: requests run again, the engine is brought up again, and both within bounds."""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from orca_jax.config import RestartBound
from orca_jax.errors import EngineError, WorkerLost
from orca_jax.scheduler import Scheduler


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
    """The scheduler's loop over an engine that may lose its workers.

    `trouble` says what was lost while the engine is down, None while it works; `on_trouble`, if it is set,
    hears of each loss, and with None when the engine is up again, on the scheduler's thread. `losses` counts
    them all. An engine that cannot be brought up again has its EngineError raised, as without this.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        bound: RestartBound,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trouble: str | None = None
        self.on_trouble: Callable[[str | None], None] | None = None
        self.losses = 0
        self._scheduler = scheduler
        engine = scheduler.engine
        self._engine = engine if isinstance(engine, RecoverableEngine) else None
        self._bound = bound
        self._clock = clock
        self._recent: deque[float] = deque()

    def step(self, interrupted: Callable[[], bool]) -> bool:
        """One turn of the scheduler's loop, or of bringing the engine up; False when there was nothing to do.

        The latter is left when `interrupted`, and to end requests that were asked to. Raises EngineError when
        the engine has failed for good.
        """
        engine = self._engine
        if engine is None:
            return self._scheduler.step()
        try:
            if self.trouble is not None:
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
        self._tell(None)
        return True

    def _take_loss(self, lost: WorkerLost) -> None:
        now = self._clock()
        self.losses += 1
        self._scheduler.run_again()
        while self._recent and self._recent[0] <= now - self._bound.seconds:
            self._recent.popleft()
        self._recent.append(now)
        self._tell(str(lost))
        if len(self._recent) > self._bound.restarts:
            message = (
                f"workers were lost {len(self._recent)} times within {self._bound.seconds:g} seconds, and "
            )
            message += f"{self._bound.restarts} restarts are allowed; the last: {lost}"
            raise EngineError(message) from lost

    def _tell(self, trouble: str | None) -> None:
        self.trouble = trouble
        if self.on_trouble is not None:
            self.on_trouble(trouble)
