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

_STOP_SECONDS = 30.0  # a program that is being compiled cannot be stopped


def first_buckets(buckets: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """The buckets to start with: one for `max_rows` decodes, and the largest. `buckets` ascend."""
    decode = next(size for size in buckets if size >= min(max_rows, buckets[-1]))
    return tuple(sorted({decode, buckets[-1]}))


def later_buckets(buckets: Sequence[int], max_rows: int) -> list[int]:
    """The buckets that `first_buckets` leaves out, the most useful first.

    Powers of two above the decodes, which halve the padding of prompts, come before smaller decodes, and
    these before the sizes in between.
    """
    first = first_buckets(buckets, max_rows)
    others = [size for size in buckets if size not in first]
    halves = [size for size in others if size > first[0] and size.bit_count() == 1]
    return sorted(others, key=lambda size: (size not in halves, size))


class LaterPrograms:
    """The programs of buckets that `workers` do not use yet, compiled on a thread from `start` to `close`.

    The workers use each bucket as soon as all its programs are compiled. If one cannot be compiled, a warning
    is logged and the engine keeps the buckets that it has.
    """

    def __init__(self, workers: LocalWorkers, shape: EngineShape, buckets: Sequence[int]) -> None:
        self._workers = workers
        self._shape = shape
        self._ready = workers.sizes.buckets
        self._programs = [
            (size, all_programs(workers.workers, BatchSizes(shape, (size, buckets[-1]))))
            for size in later_buckets(buckets, shape.max_rows)
        ]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_buckets: Callable[[tuple[int, ...]], object]) -> None:
        """Start compiling. The thread calls `on_buckets` with all buckets in use after each new one."""
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
                message = "could not compile for %d tokens; batches use the programs of larger buckets"
                LOGGER.warning(message, size, exc_info=True)
                break
            self._ready = tuple(sorted({*self._ready, size}))
            self._workers.use(BatchSizes(self._shape, self._ready))
            on_buckets(self._ready)
        self._programs.clear()

    def _compile(self, programs: Sequence[ToCompile]) -> bool:
        """Compile programs that no other bucket has needed; False if the engine is closing."""
        for program in programs:
            if self._stop.is_set():
                return False
            program.compile()
        return True
