"""Settings of Python itself for a server that is loaded."""

import gc
import sys

_SWITCH_SECONDS = 0.001  # Python's own are 0.005


def settle() -> None:
    """Keep what a request can make the interpreter do from holding all threads; once all is loaded.

    A full garbage collection looks at every object, for 0.2 s with JAX, and large bodies bring one about: it
    need not look at what is there by now. And a thread that waits for the interpreter gets it after a
    millisecond, because the event loop waits several times for each request while another thread computes.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_SECONDS)
