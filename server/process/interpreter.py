"""Settings of the Python interpreter for a server that has finished loading."""

import gc
import sys

_SWITCH_SECONDS = 0.001  # Python's default is 0.005
_YOUNGEST, _YOUNG, _FULL = (
    700,
    10,
    1_000,
)  # collections: each after so many allocations or younger collections


def settle() -> None:
    """Call once everything is loaded, so that no request can make the interpreter block all threads.

    Large bodies trigger full garbage collections, which visit every object and take 0.2 s with JAX loaded.
    Freezing the objects that exist now exempts them. Those of a large body take 33 ms more (a conversation of
    5,000 tool turns), so full collections come a hundred times less often than by Python's default; bodies
    have no cycles, and are freed without one. A thread that waits for the GIL now gets it after 1 ms: the
    event loop waits for it several times per request while another thread computes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, _YOUNG, _FULL)
    sys.setswitchinterval(_SWITCH_SECONDS)
