"""A process that works through numbered tasks, a line of JSON each: watched, and started anew where lost.

Its lines have `starting` (a task's number) before a task and `index` after it; anything else is passed on.
A process that falls silent is killed: a kernel that hangs does so for ever.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from orca_jax.processes.json_child import ChildSilent, JsonChild

_SILENCE = 240.0  # seconds without a line, before the first task and between them (compilation speaks)
_TASK = 75.0  # and within a task
_END_SECONDS = 60.0  # from the end of its stdout to its own
_MOST_STARTS = 8

Words = dict[str, Any]


class Lost(Exception):
    """The process is gone or was killed; the text says how."""


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
            if starting is not None or done == before:  # in a task, or before the first: it is that one's
                on_words({"index": done if starting is None else starting, "failed": str(lost)})
                done = (done if starting is None else starting) + 1
            if done >= n_tasks:
                return
    for index in range(done, n_tasks):
        on_words({"index": index, "failed": f"left out: the process was lost {_MOST_STARTS} times"})


def _lines(command: Sequence[str], *, task: float) -> Iterator[Words]:
    """The process's lines of JSON; others go to stderr. Raises Lost."""
    # Memory as it is needed: what this process does not use another framework's may.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    patience = _SILENCE
    with JsonChild(command, environment=environment, keep_stderr=False, on_other=_to_stderr) as child:
        try:
            while (words := child.receive(patience)) is not None:
                patience = task if "starting" in words else _SILENCE
                yield words
        except ChildSilent:
            raise Lost(f"silent for {patience:.0f} s and killed: it hangs") from None
        status = child.wait(_END_SECONDS)
    if status != 0:
        raise Lost(f"its process ended with status {status}")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
