"""Counts the Python lines that an action runs, to see how a cost grows without a clock."""

import sys
from collections.abc import Callable
from typing import Any


def n_lines_run(action: Callable[[], object]) -> int:
    """The lines that ran on this thread, those of calls counted."""
    n = 0

    def trace(*_: object) -> Any:
        nonlocal n
        n += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return n
