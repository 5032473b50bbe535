"""An engine that loses a worker when a test says so, and recovers when the test lets it."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from orca_jax.errors import WorkerLost
from orca_jax.request.request import Row
from orca_jax.scheduling.engine_protocol import Iteration, Returned
from tests.host.engines import GatedEngine, counting

LOST = WorkerLost(1, "its process died")


class FragileEngine(GatedEngine):
    """Loses a worker when `error` is set, and recovers when the test lets it.

    `recoveries` holds what each call of `recover` does: True or an error. Empty: it waits until interrupted.
    """

    def __init__(self, *recoveries: bool | Exception) -> None:
        super().__init__(counting)
        self.recoveries: deque[bool | Exception] = deque(recoveries)
        self.n_recovers = 0
        self.known_lost: WorkerLost | None = None
        self.is_down = threading.Event()
        self.issued: list[list[str]] = []

    def issue(self, rows: Sequence[Row]) -> Iteration:
        self.issued.append([f"{req.state.value} {req.n_tokens}" for req, _ in rows])
        return super().issue(rows)

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        try:
            return super().wait(iteration, interrupted)
        except WorkerLost:
            self.error = None
            raise

    def look(self) -> None:
        if self.known_lost is not None:
            raise self.known_lost

    def recover(self, interrupted: Callable[[], bool]) -> bool:
        self.n_recovers += 1
        self.known_lost = None
        self.is_down.set()
        for _ in range(3000):
            if self.recoveries:
                what = self.recoveries.popleft()
                if isinstance(what, Exception):
                    raise what
                return what
            if interrupted():
                return False
            self.gate.acquire(timeout=0.01)
        raise AssertionError("nobody came")
