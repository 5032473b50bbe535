"""Compiles programs ahead of their first call, in parallel threads.

A program is compiled from shapes and shardings alone: neither weights nor caches need exist.
"""

import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import jax.stages
from jax.experimental.mosaic.gpu import fragmented_array

OnProgram = Callable[[int, int, str], object]  # programs compiled, all programs, the newest one's name

_ASK = "_get_ptxas_isa_version"
_MAX_THREADS = 16
# Python runs one thread at a time. If programs are lowered in turn, XLA compiles the first while the next is
# lowered; if all were lowered at once, XLA would start late on all of them.
_lowering = threading.Lock()


class Program:
    """A jitted function that stores its ahead-of-time compiled forms, and calls one if it fits.

    `key` maps a call's arguments to the key of a compiled form. A form that was not compiled ahead is
    compiled at its first call. Arrays must have the shardings that `compile` was given.
    """

    def __init__(self, function: jax.stages.Wrapped, key: Callable[..., Hashable]) -> None:
        self._function = function
        self._key = key
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def __call__(self, *arrays: Any, **static: Any) -> Any:
        if self._compiled:
            compiled = self._compiled.get(self._key(*arrays, **static))
            if compiled is not None:
                return compiled(*arrays)
        return self._function(*arrays, **static)

    def lower(self, *shapes: Any, **static: Any) -> jax.stages.Lowered:
        """Trace and lower the function, as in jax.stages."""
        return self._function.lower(*shapes, **static)

    def compile(self, *shapes: Any, **static: Any) -> None:
        """Compile for these arguments: arrays, or jax.ShapeDtypeStructs with their shardings."""
        key = self._key(*shapes, **static)
        if key not in self._compiled:
            with _lowering:
                lowered = self.lower(*shapes, **static)
            self._compiled[key] = lowered.compile()


@dataclass(frozen=True, slots=True)
class ToCompile:
    """A form of a program to compile, with a display name."""

    name: str
    compile: Callable[[], object]


def compile_all(programs: Sequence[ToCompile], on_program: OnProgram | None = None) -> None:
    """Compile `programs` in as many threads as there are processors: XLA compiles while Python lowers.

    `on_program` is called on those threads, one call at a time. If a program fails to compile, programs that
    have begun are finished, the others are cancelled, and the error is raised.
    """
    lock = threading.Lock()
    n_done = 0

    def run(program: ToCompile) -> None:
        nonlocal n_done
        with lock:
            report(n_done, len(programs), program.name)
        program.compile()
        with lock:
            n_done += 1
            report(n_done, len(programs), program.name)

    report = on_program or (lambda n_done, n, name: None)
    n_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(n_threads, thread_name_prefix="compile") as pool:
        futures = [pool.submit(run, program) for program in programs]
        done, not_done = wait(futures, return_when=FIRST_EXCEPTION)
        for future in not_done:
            future.cancel()
        for future in done:
            future.result()


def ask_ptxas_once() -> None:
    """Make Mosaic ask ptxas for its version once, not each time a kernel converts a boolean to a number.

    Each time it starts a process and waits for it with the GIL held: about 118 times for the split-attention
    kernel, more than a second per bucket, during which no other bucket can be lowered. Does nothing if
    Mosaic's compiler is not installed.
    """
    library: Any = getattr(fragmented_array, "mgpu_lib", None)
    extension = getattr(library, "_mosaic_gpu_ext", None)
    ask = getattr(extension, _ASK, None)
    if ask is not None and not hasattr(ask, "cache_info"):
        setattr(extension, _ASK, functools.cache(ask))
