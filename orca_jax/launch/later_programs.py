"""Compiles the programs of more buckets while an engine serves with those of a few.

Every batch fits in the largest bucket, so an engine can serve with that one; the others save it padding.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from orca_jax.execution.programs import ToCompile
from orca_jax.execution.worker import LocalWorkers, all_programs
from orca_jax.iteration.flat_batch import BatchSizes
from orca_jax.iteration.shape import EngineShape

LOGGER = logging.getLogger("orca_jax.compile")

_PER_FIRST = 8  # the first buckets are this factor apart
_STOP_SECONDS = 30.0  # a program that is being compiled cannot be stopped


def first_buckets(buckets: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """The buckets to begin with: one for a decode of `max_rows`, a few larger ones, and the largest.

    `buckets` ascend.
    """
    first = [next(size for size in buckets if size >= min(max_rows, buckets[-1]))]
    for size in buckets:
        if size >= _PER_FIRST * first[-1] and _PER_FIRST * size <= 2 * buckets[-1]:
            first.append(size)
    return tuple(sorted({*first, buckets[-1]}))


class LaterPrograms:
    """The programs of buckets that `workers` do not use yet, compiled on a thread from `start` to `close`.

    Smallest buckets first; the workers use each as soon as all its programs are compiled. If one cannot be
    compiled, a warning is logged and the engine keeps the buckets that it has.
    """

    def __init__(self, workers: LocalWorkers, shape: EngineShape, buckets: Sequence[int]) -> None:
        self._workers = workers
        self._shape = shape
        self._ready = workers.sizes.buckets
        self._programs = [
            (size, all_programs(workers.workers, BatchSizes(shape, (size, buckets[-1]))))
            for size in buckets
            if size not in self._ready
        ]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_buckets: Callable[[tuple[int, ...]], object]) -> None:
        """Begin. `on_buckets` is called on the thread with the buckets in use, after each new one."""
        self._thread = threading.Thread(
            target=self._run, args=(on_buckets,), name="compile later", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop after the program that is being compiled."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _run(self, on_buckets: Callable[[tuple[int, ...]], object]) -> None:
        while self._programs:
            size, programs = self._programs.pop(0)
            try:
                if not self._compile(programs):
                    break
            except Exception:
                said = "could not compile for %d tokens; the programs of larger batches serve"
                LOGGER.warning(said, size, exc_info=True)
                break
            self._ready = tuple(sorted({*self._ready, size}))
            self._workers.use(BatchSizes(self._shape, self._ready))
            on_buckets(self._ready)
        self._programs.clear()

    def _compile(self, programs: Sequence[ToCompile]) -> bool:
        """Compile those that no other bucket has needed; False if the engine is to stop."""
        for program in programs:
            if self._stop.is_set():
                return False
            program.compile()
        return True
