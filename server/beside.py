"""Work on long texts, beside the event loop, which it would hold up."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LONG_TEXT = 8_000  # characters; what takes longer than a millisecond or two is not for the loop


async def beside(n_characters: int, work: Callable[[], T]) -> T:
    """Work that takes time with each of `n_characters`: on a thread where they are many."""
    return await asyncio.to_thread(work) if n_characters > LONG_TEXT else work()
