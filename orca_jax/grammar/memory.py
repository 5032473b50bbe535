"""How much compiled grammars hold, and when there is no room for one more.

A grammar lies in the heap of llguidance, which does not say how large it is. So the heap is asked before a
compilation and after it. A grammar grows further while outputs follow it, for each combination of rules that
they meet; that is estimated, from what hostile ones were measured to do.
"""

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

MAX_BYTES = 1 << 30  # of all grammars that are kept or followed
_UNKNOWN = 4 << 20  # where the heap cannot be asked; most have a tenth of this
_LEAST = 64 << 10
_MOST = 256 << 20  # a compilation of all that is allowed takes half: more is somebody else's

# The largest grew by 22 kB a mask at first and by 2 kB later, to 20 to 50 MB; usual ones by 0.2 MB in all.
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
    """What tells how many bytes the process's heap has given out; glibc alone does."""
    if sys.platform != "linux":
        return None
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _Mallinfo2

    def used() -> int:
        said = mallinfo2()
        return int(said.uordblks) + int(said.hblkhd)

    return used


_heap = _find_heap()


class HeapGrowth:
    """The heap's growth from when this is made: what a compilation has kept, and what other threads did."""

    def __init__(self) -> None:
        self._before = None if _heap is None else _heap()

    def n_bytes(self) -> int:
        """Within what a grammar can have."""
        if _heap is None or self._before is None:
            return _UNKNOWN
        return min(max(_heap() - self._before, _LEAST), _MOST)


def grown_by(n_masks: int) -> int:
    """Bytes that so many masks have added, about."""
    return min(n_masks * _GROWTH_PER_MASK, _MOST_GROWTH)


class Sized(Protocol):
    """A grammar."""

    @property
    def n_bytes(self) -> int:
        """What it holds."""
        ...


class LiveGrammars:
    """Those that something still refers to, whether kept or followed by a request. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all = WeakSet[Sized]()

    def add(self, grammar: Sized) -> None:
        """Count it until nothing refers to it any more."""
        with self._lock:
            self._all.add(grammar)

    def n_bytes(self) -> int:
        """Of all of them."""
        with self._lock:
            return sum(grammar.n_bytes for grammar in self._all)
