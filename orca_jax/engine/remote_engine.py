"""The engine master of workers in processes of their own: an engine that can be brought up again."""

from collections.abc import Callable

from orca_jax.engine.engine_master import EngineMaster
from orca_jax.engine.remote_workers import RemoteWorkers
from orca_jax.scheduling.kv_manager import KVManager

# Between two looks at what would interrupt the wait for tokens, which itself ends when something comes.
_WAIT_SECONDS = 1e-3


class RemoteEngine(EngineMaster):
    """An engine master whose workers may be lost.

    It is a `recovery.RecoverableEngine`: call `recover` before the first iteration, and after a WorkerLost.
    `sleep` is as in EngineMaster; its default wakes up when something comes from a worker.
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
            keeps_tokens=n_workers == 1,  # worker n has them, and they go by way of the host to worker 1
            sleep=(lambda _: workers.wait(_WAIT_SECONDS)) if sleep is None else sleep,
        )
        self.workers = workers

    def look(self) -> None:
        """See whether a worker is lost, without waiting. Raises WorkerLost, or EngineError if for good."""
        self.workers.look()

    def recover(self, interrupted: Callable[[], bool]) -> bool:
        """Bring the workers up again, with new caches; False if interrupted.

        Raises WorkerLost, or EngineError where they will never come up again.
        """
        return self.workers.recover(interrupted)
