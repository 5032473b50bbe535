"""Gives LoRA adapters to worker processes, wherever they are, as they are asked for."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from orca_jax.control.adapter_call import AdapterPiece, give_adapter
from orca_jax.control.handshake import JoinTerms
from orca_jax.engine.remote_pipeline import StageWorkers
from orca_jax.errors import ServiceClosed, WorkerLost, WorkerUnreachable

_RETRY_SECONDS = 0.1
_CALL_SECONDS = 60.0  # of an adapter of some gigabytes over a slow network


class AdapterSender:
    """Calls to all workers of a pipeline, for one thread beside that of its control lines.

    `epoch` returns the present epoch. A worker that is lost, or does not know the epoch yet, is tried again
    for up to `seconds`; the next epoch ends that, because all adapters must be sent again in it.
    """

    def __init__(
        self,
        workers: StageWorkers,
        terms: Sequence[JoinTerms],
        *,
        epoch: Callable[[], int],
        seconds: float,
    ) -> None:
        self._workers, self._terms, self._epoch, self._seconds = workers, terms, epoch, seconds
        self._closing = threading.Event()

    def send(self, version: int, stages: Sequence[Callable[[], Iterable[AdapterPiece]]]) -> None:
        """Give each stage its part of an adapter, which its function returns, and wait until all have it.

        Raises WorkerLost if another epoch began, ServiceClosed after `close`, WorkerRefused if a worker does
        not take it, and WorkerUnreachable if one is not there within `seconds`.
        """
        epoch, deadline = self._epoch(), time.monotonic() + self._seconds
        for stage, pieces in enumerate(stages):
            while True:
                try:
                    give_adapter(
                        self._workers.addresses()[stage],
                        self._terms[stage],
                        self._workers.secret,
                        epoch=epoch,
                        version=version,
                        pieces=pieces(),
                        seconds=min(_CALL_SECONDS, self._seconds),
                    )
                    break
                except WorkerUnreachable:
                    if self._epoch() != epoch:
                        raise WorkerLost(stage, "another epoch began while it got an adapter") from None
                    if time.monotonic() >= deadline:
                        raise
                if self._closing.wait(_RETRY_SECONDS):
                    raise ServiceClosed("the engine ends")

    def close(self) -> None:
        """Let a call that would be tried again fail instead."""
        self._closing.set()
