"""Makes Mosaic ask ptxas for its version once, instead of each time a kernel converts a boolean to a number.

Each time starts a process and waits for it with the GIL held: about 118 times for the split-attention kernel,
more than a second per bucket, during which no other bucket can be lowered.
"""

import functools
from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array

_ASK = "_get_ptxas_isa_version"


def ask_ptxas_once() -> None:
    """Cache the version from now on. Does nothing if Mosaic's compiler is not installed."""
    library: Any = getattr(fragmented_array, "mgpu_lib", None)
    extension = getattr(library, "_mosaic_gpu_ext", None)
    ask = getattr(extension, _ASK, None)
    if ask is not None and not hasattr(ask, "cache_info"):
        setattr(extension, _ASK, functools.cache(ask))
