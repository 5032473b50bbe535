"""Registers the CPU's operations as XLA custom calls, each once per process for given sizes."""

import threading
from functools import cache

import jax

from orca_jax.native.compiler import library

_registering = threading.Lock()  # XLA refuses a name that is registered twice


def target(operation: str, **sizes: int) -> str:
    """Name of the custom call of `operation` compiled with these sizes. Raises NotBuilt."""
    with _registering:
        return _registered(operation, tuple(sizes.items()))


@cache
def _registered(operation: str, sizes: tuple[tuple[str, int], ...]) -> str:
    function = getattr(library(operation, **dict(sizes)), operation)
    name = "_".join(("orca", operation, *(f"{macro}{value}" for macro, value in sizes)))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return name
