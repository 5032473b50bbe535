"""What the C library does with large buffers, where they are the device's memory: on a CPU.

XLA takes the temporaries of a program from malloc at each call. glibc maps blocks above 32 MiB anew each time
and gives them back at once, so that every page of them faults at every call: choosing among 128 rows of
50,257 tokens takes 30 ms with it and 6 without.
"""

import ctypes

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30  # blocks up to this come from the heap ...
_TRIM_BYTES = (1 << 31) - 1  # ... which gives memory back only above this


def keep_large_buffers() -> bool:
    """Have the C library keep freed blocks for the next call; whether it can: glibc does, others need not.

    It holds for the whole process: its memory stays at its peak.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return all([mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES), mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)])
