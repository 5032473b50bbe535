"""jax 0.10's interpreter of GPU kernels compiles anew for each thread of each thread block; here, once.

jax 0.11 compiles once by itself. Importing this module is enough; a run then takes a second, not ten.
"""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax._src.pallas.mosaic.interpret import thread_map

_lock = threading.Lock()
_compiled: dict[int, tuple[Any, Callable[..., Any]]] = {}


def _run_jaxpr(jaxpr: Any, consts: Any, *arguments: Any) -> None:
    with _lock:
        if id(jaxpr) not in _compiled:  # kept beside its program, so that no other gets its id

            def run(consts: Any, *arguments: Any) -> None:
                jax.core.eval_jaxpr(jaxpr, consts, *arguments)

            _compiled[id(jaxpr)] = jaxpr, jax.jit(run).lower(consts, *arguments).compile()
    _compiled[id(jaxpr)][1](consts, *arguments)


if not hasattr(thread_map, "_run"):
    thread_map._run_jaxpr = _run_jaxpr
