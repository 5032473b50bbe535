"""The workers of one process as the engine master sees them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from orca_jax.execution.programs import ToCompile
from orca_jax.execution.sampling import DeviceTokens
from orca_jax.execution.worker import Worker
from orca_jax.iteration.flat_batch import BatchSizes, FlatBatch
from orca_jax.iteration.message import ControlMessage, MakeWords
from orca_jax.request.sampled import Sampled
from orca_jax.sharding.link import DeviceLink


class LocalIteration:
    """PendingTokens of an iteration; `go_on` starts the parts that had to wait."""

    def __init__(
        self, message: ControlMessage, flat: FlatBatch, words: MakeWords, go_on: Callable[[], None]
    ) -> None:
        self.message, self.flat, self.words = message, flat, words
        self.out: Any = None  # of the forward pass
        self.tokens: DeviceTokens | None = None
        self._go_on = go_on

    def is_ready(self) -> bool:
        """Whether `fetch` would return at once."""
        if self.tokens is None:
            self._go_on()
        return self.tokens is not None and self.tokens.is_ready()

    def fetch(self) -> Sampled:
        """What was sampled, after waiting for the device; what failed there is raised here."""
        if self.tokens is None:
            self._go_on()
        assert self.tokens is not None, "its requests' tokens before it have come back"
        return self.tokens.fetch()


class LocalWorkers:
    """All stages, first to last; a batch is laid out once for all of them.

    A device runs what it is given in order, so what is kept on it is whole before the next iteration reads
    it; and so an iteration waits here for the one before it, as long as that one's tokens cannot be chosen.
    """

    def __init__(self, workers: Sequence[Worker], sizes: BatchSizes) -> None:
        self.workers = tuple(workers)
        self._sizes = sizes
        self._links = [DeviceLink(worker.stage.part.group) for worker in self.workers]
        self._to_do: deque[LocalIteration] = deque()

    def issue(self, message: ControlMessage, words: MakeWords) -> LocalIteration:
        """engine_master.Workers."""
        iteration = LocalIteration(message, self._sizes.lay_out(message), words, self._go_on)
        self._to_do.append(iteration)
        self._go_on()
        return iteration

    def _go_on(self) -> None:
        """Start all that can be, in order, without waiting."""
        try:
            while self._to_do:
                one = self._to_do[0]
                if one.out is None:
                    one.out = self._forward(one.flat)
                words = one.words() if one.flat.programs.allow else None
                if one.flat.programs.allow and words is None:
                    return
                one.tokens = self.workers[-1].choose(one.out, one.message, one.flat, words)
                one.out = None
                self._to_do.popleft()
        except Exception:
            self._to_do.clear()
            raise

    def _forward(self, flat: FlatBatch) -> Any:
        """Through all stages: the newest tokens from the last to the first, and from there hidden states."""
        arrived = self.workers[-1].last_token
        if len(self.workers) > 1:
            arrived = self._links[0].send(arrived)
        for worker, link in zip(self.workers, [*self._links[1:], None], strict=True):
            out = worker.forward(flat, arrived)
            arrived = out if link is None else link.send(out)
        return arrived


def all_programs(workers: Sequence[Worker], sizes: BatchSizes) -> list[ToCompile]:
    """What an iteration of these stages may ask for."""
    return [program for stage in programs_by_stage(workers, sizes) for program in stage]


def programs_by_stage(workers: Sequence[Worker], sizes: BatchSizes) -> list[list[ToCompile]]:
    """The same, each stage's by themselves, with its number in their names where there are several."""
    return [
        [
            replace(program, name=f"stage {i + 1}: {program.name}") if len(workers) > 1 else program
            for program in worker.programs(sizes)
        ]
        for i, worker in enumerate(workers)
    ]
