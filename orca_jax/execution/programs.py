"""Programs that are compiled ahead of their first call, in parallel threads.

A program is compiled from shapes and places alone: neither weights nor caches need be there.
"""

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import jax.stages

OnProgram = Callable[[int, int, str], object]  # done, in all, and the one that was begun last

_MAX_THREADS = 16
# Python runs one thread at a time. Lowered in turn, the first program is with XLA while the next is lowered;
# all at once, they would all come to XLA late.
_lowering = threading.Lock()


class Program:
    """A jitted function that keeps what was compiled of it ahead of time, and calls that where it fits.

    `key` gives of a call's arguments what sets one compiled form apart from the others; a form that was not
    compiled ahead is compiled at its first call. Arrays must lie where `compile` was told that they would.
    """

    def __init__(self, function: jax.stages.Wrapped, key: Callable[..., Hashable]) -> None:
        self._function = function
        self._key = key
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def __call__(self, *arrays: Any, **static: Any) -> Any:
        """What the function gives."""
        if self._compiled:
            compiled = self._compiled.get(self._key(*arrays, **static))
            if compiled is not None:
                return compiled(*arrays)
        return self._function(*arrays, **static)

    def lower(self, *shapes: Any, **static: Any) -> jax.stages.Lowered:
        """Trace it and lower it, as jax.stages has it."""
        return self._function.lower(*shapes, **static)

    def compile(self, *shapes: Any, **static: Any) -> None:
        """Compile for these: arrays, or jax.ShapeDtypeStructs that say where the arrays will lie."""
        key = self._key(*shapes, **static)
        if key not in self._compiled:
            with _lowering:
                lowered = self.lower(*shapes, **static)
            self._compiled[key] = lowered.compile()


@dataclass(frozen=True, slots=True)
class ToCompile:
    """A program's form that is to be compiled, by a name for people."""

    name: str
    compile: Callable[[], object]


def compile_all(programs: Sequence[ToCompile], on_program: OnProgram | None = None) -> None:
    """Compile them, as many at once as there are processors: XLA's part runs beside Python's.

    `on_program` is called on the threads, one call at a time. What fails is raised when those that have
    begun are done; the others are left then.
    """
    lock = threading.Lock()
    n_done = 0

    def run(one: ToCompile) -> None:
        nonlocal n_done
        with lock:
            tell(n_done, len(programs), one.name)
        one.compile()
        with lock:
            n_done += 1
            tell(n_done, len(programs), one.name)

    tell = on_program or _nobody_looks
    n_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(n_threads, thread_name_prefix="compile") as pool:
        futures = [pool.submit(run, one) for one in programs]
        done, left = wait(futures, return_when=FIRST_EXCEPTION)
        for future in left:
            future.cancel()
        for future in done:
            future.result()


def _nobody_looks(done: int, total: int, name: str) -> None:
    """At the progress."""
