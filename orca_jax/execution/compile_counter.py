"""Counts the programs that this process compiles, from JAX's own monitoring events."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.monitoring

from orca_jax.config import OnCompile
from orca_jax.errors import NotCompiledAhead

LOGGER = logging.getLogger("orca_jax.compile")

# JAX sends _COMPILE as a scalar when it asks XLA for a program, and as a duration when the program is there.
# In between it sends _FROM_DISK if the program was in the disk cache.
_COMPILE = "/jax/core/compile/backend_compile_duration"
_FROM_DISK = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True, slots=True)
class CompileCounts:
    """The counts of a counter."""

    programs: int = 0  # that JAX requested from XLA
    from_disk: int = 0  # of these, read from the disk cache
    seconds: float = 0.0  # summed over threads


class CompileCounter:
    """Counts from construction until `close`, whichever code of the process compiles. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs = self._from_disk = 0
        self._seconds = 0.0
        self._watched: tuple[threading.Thread | None, OnCompile] = None, "warn"
        self._warned = set[str]()
        self._listens = True
        jax.monitoring.register_scalar_listener(self._begins)
        jax.monitoring.register_event_duration_secs_listener(self._ends)
        jax.monitoring.register_event_listener(self._event)

    def counts(self) -> CompileCounts:
        with self._lock:
            return CompileCounts(self._programs, self._from_disk, self._seconds)

    def watch(self, thread: threading.Thread | None, on_compile: OnCompile) -> None:
        """From now on, treat compiles on this thread as unexpected; with None, no compile is.

        An unexpected compile logs a warning, once per function. With "error" it is refused before it begins:
        the caller gets NotCompiledAhead.
        """
        self._watched = thread, on_compile

    def close(self) -> None:
        """Stop listening; idempotent."""
        with self._lock:
            if not self._listens:
                return
            self._listens = False
        listeners: list[tuple[Callable[..., None], Callable[..., None]]] = [
            (jax.monitoring.unregister_scalar_listener, self._begins),
            (jax.monitoring.unregister_event_duration_listener, self._ends),
            (jax.monitoring.unregister_event_listener, self._event),
        ]
        for unregister, listener in listeners:
            try:
                unregister(listener)
            except (AssertionError, ValueError):
                pass  # another library has removed all listeners, as Tunix's metrics logger does

    # Called by JAX on the thread that compiles.

    def _begins(self, event: str, value: float, **about: Any) -> None:
        if event == _COMPILE and self._is_watched("error"):
            raise NotCompiledAhead(
                f"{about.get('fun_name', 'a program')} would have to be compiled after the engine was ready, "
                "which on_compile=error forbids; report this, and serve with on_compile=warn meanwhile"
            )

    def _ends(self, event: str, duration_secs: float, **about: Any) -> None:
        if event != _COMPILE:
            return
        name = str(about.get("fun_name", "a program"))
        with self._lock:
            self._programs += 1
            self._seconds += duration_secs
            warn = self._is_watched("warn") and name not in self._warned
            if warn:
                self._warned.add(name)
        if warn:
            LOGGER.warning("%s was compiled after ready: requests waited %.2f s for it", name, duration_secs)

    def _event(self, event: str, **about: Any) -> None:
        if event == _FROM_DISK:
            with self._lock:
                self._from_disk += 1

    def _is_watched(self, on_compile: OnCompile) -> bool:
        return self._watched == (threading.current_thread(), on_compile)
