"""Random ids that nobody can guess, at little cost for the event loop."""

import os
from collections import deque

_N_DIGITS = 32
_AT_ONCE = 256
_spare = deque[str]()


def random_id() -> str:
    """32 hexadecimal digits; for any thread.

    The system is asked for many at once, because each call releases the GIL, and the event loop then waits
    for it while the scheduler's thread computes.
    """
    try:
        return _spare.popleft()
    except IndexError:
        digits = os.urandom(_AT_ONCE * _N_DIGITS // 2).hex()
        ids = [digits[i : i + _N_DIGITS] for i in range(0, len(digits), _N_DIGITS)]
        _spare.extend(ids[1:])
        return ids[0]
