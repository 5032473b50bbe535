"""What a process holds: memory, files and threads, now and at their most while somebody looks."""

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
        """That of a process now."""
        process = Path(f"/proc/{pid}")
        fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        rss = 1024 * int(fields["VmRSS"].split()[0])
        return cls(rss, sum(1 for _ in (process / "fd").iterdir()), int(fields["Threads"]))

    def most(self, other: "Footprint") -> "Footprint":
        """The larger of each."""
        return Footprint(
            max(self.rss, other.rss), max(self.files, other.files), max(self.threads, other.threads)
        )


class Watched:
    """A context manager that looks at a process all the time: `before` it was entered, and at its `most`."""

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
