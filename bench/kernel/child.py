"""Runs a process that works through numbered tasks, with one line of JSON each, and restarts it if it dies.

The process prints `starting` (a task's number) before a task and `index` after it; other lines are passed on.
A silent process is killed, because a hung kernel never returns.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from orca_jax.workers.json_child import ChildSilent, JsonChild

_SILENCE = 240.0  # seconds without a line, before the first task and between them (compilation prints lines)
_TASK = 75.0  # the same within a task
_END_SECONDS = 60.0  # from the end of its stdout to its exit
_MOST_STARTS = 8

Words = dict[str, Any]


class Lost(Exception):
    """The process died or was killed; the message says how."""


def work_through(
    module: str,
    arguments: Sequence[str],
    n_tasks: int,
    on_words: Callable[[Words], None],
    *,
    task: float = _TASK,
) -> None:
    """Run `python -m module arguments --done N` until all tasks are done; a task that kills it has failed."""
    done = 0
    for _ in range(_MOST_STARTS):
        before, starting = done, None
        try:
            for words in _lines([sys.executable, "-m", module, *arguments, "--done", str(done)], task=task):
                if "index" in words:
                    done, starting = int(words["index"]) + 1, None
                elif "starting" in words:
                    starting = int(words["starting"])
                on_words(words)
            return
        except Lost as lost:
            if starting is not None or done == before:  # the current or the next task killed it
                on_words({"index": done if starting is None else starting, "failed": str(lost)})
                done = (done if starting is None else starting) + 1
            if done >= n_tasks:
                return
    for index in range(done, n_tasks):
        on_words({"index": index, "failed": f"not run: the process died {_MOST_STARTS} times"})


def _lines(command: Sequence[str], *, task: float) -> Iterator[Words]:
    """The process's lines of JSON; others go to stderr. Raises Lost."""
    # Allocate on demand, to leave the rest of the memory to another framework's process.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    timeout = _SILENCE
    with JsonChild(command, environment=environment, keep_stderr=False, on_other=_to_stderr) as child:
        try:
            while (words := child.receive(timeout)) is not None:
                timeout = task if "starting" in words else _SILENCE
                yield words
        except ChildSilent:
            raise Lost(f"it hangs: silent for {timeout:.0f} s, and killed") from None
        status = child.wait(_END_SECONDS)
    if status != 0:
        raise Lost(f"its process ended with status {status}")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
