"""Faults pages of host memory in ahead of their first write.

That write is slow, because the system has to find and clear the page: on a virtual machine the first
4 MiB of blocks that came from another server took 18 ms, and 0.2 ms if their pages were there.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy.typing as npt

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: as a write would, without changing the contents
_PAGE = 4096  # no page is smaller
_LEAD_BYTES = 256 << 20
_STEP_BYTES = 1 << 20  # of one call, during which no other thread can map memory
_JOIN_SECONDS = 10.0


class Prefault:
    """Keeps the pages of `lead_bytes` of arrays [n, ...] ready after the highest index that is written to.

    A thread faults them in, and ends when the lead is reached. Where the system has no such call, each page
    comes with its first write.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], lead_bytes: int = _LEAD_BYTES) -> None:
        self._arrays = arrays
        self._n = len(arrays[0])
        each = max(1, sum(array[0].nbytes for array in arrays))
        self._lead, self._step = max(1, lead_bytes // each), max(1, _STEP_BYTES // each)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._done = self._goal = 0  # indices before these are ready, or are to be
        self.reach(0)

    def reach(self, index: int) -> None:
        """Note that the array is written at an index, so that the next pages may be needed. Any thread."""
        goal = min(self._n, index + self._lead)
        if goal <= self._goal or (goal < self._n and goal - self._goal < self._lead // 2):
            return
        with self._lock:
            self._goal = max(self._goal, goal)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="orca-kv-prefault", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Fault no more pages in. A second call does nothing."""
        with self._lock:
            self._closed, thread = True, self._thread
        if thread is not None:
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while True:
            with self._lock:
                start, end = self._done, min(self._goal, self._done + self._step)
                if self._closed or start == end:
                    self._thread = None
                    return
            ok = all(_populate(array[start:end]) for array in self._arrays)
            with self._lock:
                self._done = end
                self._closed = self._closed or not ok


def _populate(array: npt.NDArray[Any]) -> bool:
    """Fault in the pages of a contiguous array; whether the system can."""
    madvise = _madvise()
    address: int = array.ctypes.data
    start = address - address % _PAGE
    return madvise is not None and madvise(start, address + array.nbytes - start, _POPULATE_WRITE) == 0


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's function; None where it has none."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    return madvise
