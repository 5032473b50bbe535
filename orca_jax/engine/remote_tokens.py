"""The tokens of an iteration on remote workers, which may not have come yet."""

from typing import Protocol

from orca_jax.control.sampled_wire import ExpectedRecords
from orca_jax.control.worker_pb2 import Tokens
from orca_jax.iteration.message import MakeWords
from orca_jax.request.sampled import Sampled


class Looks(Protocol):
    """Handles what arrives from the workers; RemoteWorkers does."""

    def look(self) -> None:
        """Handle all arrivals without blocking. Raises WorkerLost."""
        ...

    def wait(self) -> None:
        """Wait for an arrival for a moment, and handle it. Raises WorkerLost."""
        ...


class RemoteTokens:
    """PendingTokens of an iteration on remote workers; `number` counts the iterations of its epoch.

    Both methods raise WorkerLost.
    """

    def __init__(
        self,
        workers: Looks,
        number: int,
        expected: ExpectedRecords,
        *,
        sent: float,
        words: MakeWords | None,
    ) -> None:
        self.number = number
        self.expected = expected
        self.sent = sent
        self.words = words  # None if not needed or already sent
        self.payload: Tokens | None = None  # as received
        self.sampled: Sampled | None = None  # decoded from `payload`
        self._workers = workers

    def is_ready(self) -> bool:
        """Whether the tokens are here; handles all arrivals and checks the deadline."""
        if self.sampled is None:
            self._workers.look()
        return self.sampled is not None

    def fetch(self) -> Sampled:
        """Wait for the tokens, at most until the deadline."""
        while not self.is_ready():
            self._workers.wait()
        assert self.sampled is not None
        return self.sampled
