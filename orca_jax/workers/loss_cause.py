"""Infers a loss's cause from how worker processes ended: a fault, a signal from outside, the OOM killer."""

import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from orca_jax.errors import LossCause

# Signals that a process causes by a fault of its own. Any other signal was sent to it.
_OWN_SIGNALS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
        signal.SIGXCPU,
        signal.SIGXFSZ,
    }
)
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class ProcessState(NamedTuple):
    """A worker process since it was last ready.

    `status` is Popen's returncode, None while it runs. It `was_suspect` if the supervisor killed it, and
    `was_stopped` if it was ever stopped, as by SIGSTOP.
    """

    status: int | None
    was_suspect: bool = False
    was_stopped: bool = False


def cause_of_states(states: Iterable[ProcessState], *, seen: LossCause, for_memory: bool) -> LossCause:
    """The cause of the loss of an epoch, given the states of all stages' processes.

    `for_memory`: the kernel's OOM killer ended some process meanwhile. `seen` is the result if no process
    ended or was stopped.
    """
    states = list(states)
    ends = [state.status for state in states if state.status is not None and not state.was_suspect]
    if for_memory and -signal.SIGKILL in ends:
        return LossCause.MEMORY
    # A worker ends with status 0 on SIGTERM or SIGINT. A killed worker makes others fail, so this check comes
    # first.
    if any(status <= 0 and -status not in _OWN_SIGNALS for status in ends):
        return LossCause.OUTSIDE
    if any(status < 0 for status in ends):
        return LossCause.FAULT
    # A stopped process makes others wait until they exit.
    if any(state.was_stopped for state in states):
        return LossCause.OUTSIDE
    return LossCause.FAULT if ends else seen


class OomKills:
    """The kernel's count of processes that its OOM killer ended.

    It is the count of this process's cgroup, which its children share, from memory.events (version 2) or
    memory.oom_control (version 1). If neither can be read, it is the machine's, from /proc/vmstat.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = [*_cgroup_files(root), root / "proc/vmstat"]
        self._known = self._count()

    def mark(self) -> None:
        """Remember the present count for `rose`."""
        self._known = self._count()

    def rose(self) -> bool:
        """Whether the count rose since `mark`; False where there is no count."""
        return self._count() > self._known

    def _count(self) -> int:
        for path in self._files:
            try:
                found = _OOM_KILLS.search(path.read_text())
            except (OSError, ValueError):
                continue
            if found:
                return int(found[1])
        return 0


def _cgroup_files(root: Path) -> list[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return []
    files: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # In a container the path may be the host's, and the container's own group the root.
        files += [base / path.lstrip("/") / name, base / name]
    return files
