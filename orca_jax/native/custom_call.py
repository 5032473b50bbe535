"""The CPU's operations as XLA custom calls, each registered once per process for given sizes."""

import threading
from functools import cache

import jax

from orca_jax.native.compiler import library

_registering = threading.Lock()  # a name can be registered once


def target(operation: str, **sizes: int) -> str:
    """The name of the custom call of `operation` with these sizes (compiler.py). Raises NotBuilt."""
    with _registering:
        return _registered(operation, tuple(sizes.items()))


@cache
def _registered(operation: str, sizes: tuple[tuple[str, int], ...]) -> str:
    function = getattr(library(operation, **dict(sizes)), operation)
    name = "_".join(("orca", operation, *(str(value) for _, value in sizes)))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return name
