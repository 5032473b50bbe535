"""The processes that this one started, directly or not."""

import os
from pathlib import Path


def descendants(title: str) -> list[int]:
    """Descendants of this process whose command line contains `title`."""
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal() and title in _read(folder / "cmdline") and _is_ours(int(folder.name))
    ]


def _is_ours(pid: int) -> bool:
    while pid > 1:
        after_name = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        if not after_name:
            return False
        pid = int(after_name[1])
        if pid == os.getpid():
            return True
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""
