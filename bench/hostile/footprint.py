"""A process's memory, files and threads: current, and maximum over a period."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of resident memory, open descriptors, threads."""

    rss: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """A process's current values."""
        process = Path(f"/proc/{pid}")
        fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        rss = 1024 * int(fields["VmRSS"].split()[0])
        return cls(rss, sum(1 for _ in (process / "fd").iterdir()), int(fields["Threads"]))

    def most(self, other: "Footprint") -> "Footprint":
        """The larger of each value."""
        return Footprint(
            max(self.rss, other.rss), max(self.files, other.files), max(self.threads, other.threads)
        )


class Watched:
    """A context manager that samples a process: `before` on entry, and at its `most`."""

    def __init__(self, pid: int) -> None:
        self.before = self.most = Footprint.of(pid)
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="footprint", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self.most = self.most.most(Footprint.of(self._pid))
