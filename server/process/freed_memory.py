"""Memory that long requests took and no longer need goes back to the system.

An engine on a CPU has the C library keep what is freed, because XLA's temporaries want it
(orca_jax/execution/host_allocator.py). Long bodies leave holes there that grow with each round of them:
bodies of 4 MiB of token ids took the process from 1.8 GB to 2.8. So after such bodies free pages are given
back, seldom enough that an iteration does not notice.
"""

import asyncio
import ctypes
import gc
from collections.abc import Callable

_LOOK_SECONDS = 5.0


async def give_back(n_long: Callable[[], int]) -> None:
    """Look now and then, as long as this runs; `n_long` counts the long bodies so far."""
    seen = n_long()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        n = n_long()
        if n != seen:
            seen = n
            await asyncio.to_thread(trim)


def trim() -> bool:
    """Free what is only held in reference cycles, then give free pages back; whether the C library can."""
    gc.collect()
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    malloc_trim.argtypes, malloc_trim.restype = (ctypes.c_size_t,), ctypes.c_int
    malloc_trim(0)
    return True
