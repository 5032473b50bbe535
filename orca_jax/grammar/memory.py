"""The memory of compiled grammars, which has a limit.

A grammar is in the heap of llguidance, which does not report its size. So the heap is measured before and
after a compilation. A grammar grows further while outputs follow it, for each new combination of rules;
this is estimated from measurements of hostile grammars.
"""

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

MAX_BYTES = 1 << 30  # of all grammars, cached or in use
KEPT_BYTES = 64 << 20  # of cached grammars: dozens of usual ones, and few that were written to be large
_UNKNOWN = 4 << 20  # assumed if the heap cannot be measured; most grammars need a tenth of this
_LEAST = 64 << 10
_MOST = 256 << 20  # the largest allowed grammar takes half; anything above is another thread's memory

# The largest grammars grew by 22 kB a mask at first and by 2 kB later, to 20 to 50 MB in all; usual ones grew
# by 0.2 MB in all.
_GROWTH_PER_MASK = 8 << 10
_MOST_GROWTH = 32 << 20


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _find_heap() -> Callable[[], int] | None:
    """A function that returns the bytes allocated in the process's heap; only glibc has one."""
    if sys.platform != "linux":
        return None
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _Mallinfo2

    def used() -> int:
        info = mallinfo2()
        return int(info.uordblks) + int(info.hblkhd)

    return used


_heap = _find_heap()


class HeapGrowth:
    """Heap growth since construction: memory kept by a compilation, plus allocations of other threads."""

    def __init__(self) -> None:
        self._before = None if _heap is None else _heap()

    def n_bytes(self) -> int:
        """The growth, limited to sizes that a grammar can have."""
        if _heap is None or self._before is None:
            return _UNKNOWN
        return min(max(_heap() - self._before, _LEAST), _MOST)


def grown_by(n_masks: int) -> int:
    """Approximate growth in bytes after `n_masks` masks."""
    return min(n_masks * _GROWTH_PER_MASK, _MOST_GROWTH)


class Sized(Protocol):
    """Anything that reports its size, such as a grammar."""

    @property
    def n_bytes(self) -> int: ...


class LiveGrammars:
    """All grammars that are still referenced, cached or in use. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all = WeakSet[Sized]()

    def add(self, grammar: Sized) -> None:
        """Count `grammar` as long as anything refers to it."""
        with self._lock:
            self._all.add(grammar)

    def n_bytes(self) -> int:
        with self._lock:
            return sum(grammar.n_bytes for grammar in self._all)
