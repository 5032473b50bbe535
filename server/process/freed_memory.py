"""Gives freed memory back to the system after long requests."""

import asyncio
import gc
from collections.abc import Callable

from orca_jax import host_memory

_LOOK_SECONDS = 5.0


async def give_back(n_long: Callable[[], int]) -> None:
    """Run forever: trim memory when `n_long`, the count of long bodies so far, has grown."""
    n_trimmed = n_long()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        n = n_long()
        if n != n_trimmed:
            n_trimmed = n
            await asyncio.to_thread(trim)


def trim() -> bool:
    """Collect young reference cycles, then release free pages; False if the C library has no `malloc_trim`.

    A collection of all generations would visit every object while it holds the GIL: 0.1 s for all others.
    """
    gc.collect(1)
    return host_memory.give_back()
