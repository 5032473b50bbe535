"""The engine master of worker processes: an engine that recovers from lost workers."""

from collections.abc import Callable

from orca_jax.engine.engine_master import EngineMaster
from orca_jax.engine.remote_workers import RemoteWorkers
from orca_jax.scheduling.kv_manager import KVManager

# The interval of checks for an interruption while waiting for tokens; an arrival ends the wait at once.
_WAIT_SECONDS = 1e-3


class RemoteEngine(EngineMaster):
    """An engine master whose workers may be lost: a `recovery.RecoverableEngine`.

    Call `recover` before the first iteration and after a WorkerLost. `sleep` is as in EngineMaster; its
    default wakes up when a frame arrives.
    """

    def __init__(
        self,
        workers: RemoteWorkers,
        kv: KVManager,
        *,
        vocab_size: int,
        n_workers: int,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(
            workers,
            kv,
            vocab_size=vocab_size,
            n_workers=n_workers,
            keeps_tokens=n_workers == 1,  # otherwise worker n has them, and the host passes them to worker 1
            sleep=(lambda _: workers.wait(_WAIT_SECONDS)) if sleep is None else sleep,
        )
        self.workers = workers

    def look(self) -> None:
        """Check for lost workers without blocking. Raises WorkerLost, or EngineError if the loss is final."""
        self.workers.look()

    def recover(self, interrupted: Callable[[], bool]) -> bool:
        """Bring the workers up again with new caches; return False if interrupted.

        Raises WorkerLost, or EngineError if the workers will never come up again.
        """
        return self.workers.recover(interrupted)
