"""The tokens of an iteration on remote workers, which may not have come yet."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from orca_jax.control.routed_wire import decode_routed, join_stages
from orca_jax.control.sampled_wire import ExpectedRecords
from orca_jax.control.worker_pb2 import Tokens
from orca_jax.errors import BadFrame
from orca_jax.iteration.message import MakeWords
from orca_jax.request.routed_experts import ExpertIds, Routing
from orca_jax.request.sampled import Sampled


class Looks(Protocol):
    """Handles what arrives from the workers; RemoteWorkers does."""

    def look(self) -> None:
        """Handle all arrivals without blocking. Raises WorkerLost."""
        ...

    def wait(self) -> None:
        """Wait for an arrival for a moment, and handle it. Raises WorkerLost."""
        ...


class RoutedParts:
    """The experts of an iteration's tokens, stage by stage; `rows` that ask, each with its input tokens."""

    def __init__(self, n_stages: int, rows: Sequence[tuple[int, int]], routing: Routing) -> None:
        self._rows, self._routing = rows, routing
        self._stages: list[dict[int, ExpertIds] | None] = [None] * n_stages

    @property
    def complete(self) -> bool:
        """Whether all stages have told theirs."""
        return None not in self._stages

    def take(self, stage: int, data: bytes) -> None:
        """Take one stage's. Raises BadFrame."""
        self._stages[stage] = decode_routed(data, self._rows, self._routing)

    def joined(self) -> dict[int, ExpertIds]:
        """By place in the batch, those of all stages. Raises BadFrame unless they are all layers'."""
        return join_stages([stage for stage in self._stages if stage is not None], self._rows, self._routing)


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
        parts: RoutedParts | None,
    ) -> None:
        self.number = number
        self.expected = expected
        self.sent = sent
        self.words = words  # None if not needed or already sent
        self.payload: Tokens | None = None  # as received
        self.sampled: Sampled | None = None  # decoded from `payload`, with the experts of all stages
        self._tokens: Sampled | None = None  # without experts
        self._parts = parts
        self._workers = workers

    def take(self, payload: Tokens, sampled: Sampled) -> None:
        """Take what the last stage sampled; `take_routed` follows."""
        self.payload, self._tokens = payload, sampled

    def take_routed(self, stage: int, data: bytes) -> None:
        """Take the experts that a stage tells with its end of the iteration. Raises BadFrame."""
        parts = self._parts
        if parts is None:
            if data:
                raise BadFrame(f"it tells of experts in iteration {self.number}, whose rows do not ask")
            self.sampled = self._tokens
            return
        parts.take(stage, data)
        if parts.complete and self._tokens is not None:
            self.sampled = replace(self._tokens, routed=parts.joined())

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
