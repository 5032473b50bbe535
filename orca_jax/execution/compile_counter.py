"""What JAX itself says of compiling: how many programs this process compiled, and which one it begins now."""

import logging
import threading
from dataclasses import dataclass
from typing import Any

import jax.monitoring

from orca_jax.config import OnCompile
from orca_jax.errors import NotCompiledAhead

LOGGER = logging.getLogger("orca_jax.compile")

# JAX tells the first when it asks XLA for a program (a scalar: the time) and when it has it (a duration) ...
_COMPILE = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_hits"  # ... and this in between, where the program was on disk


@dataclass(frozen=True, slots=True)
class CompileCounts:
    """Since the counter was made: programs that JAX asked XLA for, those of them that were read from disk,
    and the seconds of all, added up over threads.
    """

    programs: int = 0
    from_disk: int = 0
    seconds: float = 0.0


class CompileCounter:
    """Listens to JAX's monitoring events from when it is made until `close`; for use from many threads.

    JAX tells them to all listeners of a process, whoever compiles.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._programs = self._from_disk = 0
        self._seconds = 0.0
        self._watched: tuple[str | None, OnCompile] = None, "warn"
        self._told = set[str]()
        self._listens = True
        jax.monitoring.register_scalar_listener(self._begins)
        jax.monitoring.register_event_duration_secs_listener(self._ends)
        jax.monitoring.register_event_listener(self._event)

    def counts(self) -> CompileCounts:
        """As they stand."""
        with self._lock:
            return CompileCounts(self._programs, self._from_disk, self._seconds)

    def watch(self, thread: str | None, on_compile: OnCompile) -> None:
        """From now on nothing should be compiled on threads of this name; None: anything may be anywhere.

        What is all the same is a warning in the log, once for each function; with "error" it is refused
        before it begins: the caller gets NotCompiledAhead.
        """
        self._watched = thread, on_compile

    def close(self) -> None:
        """Listen no more; nothing the second time."""
        with self._lock:
            if not self._listens:
                return
            self._listens = False
        jax.monitoring.unregister_scalar_listener(self._begins)
        jax.monitoring.unregister_event_duration_listener(self._ends)
        jax.monitoring.unregister_event_listener(self._event)

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
            tell = self._is_watched("warn") and name not in self._told
            if tell:
                self._told.add(name)
        if tell:
            LOGGER.warning("%s was compiled after ready: requests waited %.2f s for it", name, duration_secs)

    def _event(self, event: str, **about: Any) -> None:
        if event == _FOUND:
            with self._lock:
                self._from_disk += 1

    def _is_watched(self, on_compile: OnCompile) -> bool:
        return self._watched == (threading.current_thread().name, on_compile)
