"""Mosaic asks ptxas for its version wherever a kernel turns a truth value into a number; once is enough.

Each time that starts a process, for which Python waits with its lock held: about 118 times in the
split-attention kernel, so more than a second for each bucket, in which no other bucket is lowered either.
"""

import functools
from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array

_ASK = "_get_ptxas_isa_version"


def ask_ptxas_once() -> None:
    """From now on this process asks once. Does nothing where Mosaic's compiler is not installed."""
    library: Any = getattr(fragmented_array, "mgpu_lib", None)
    extension = getattr(library, "_mosaic_gpu_ext", None)
    ask = getattr(extension, _ASK, None)
    if ask is not None and not hasattr(ask, "cache_info"):
        setattr(extension, _ASK, functools.cache(ask))
