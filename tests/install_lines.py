"""The commands in documents and docstrings that install packages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.documents import DOCUMENTS, relative
from tests.places import ROOT

# Records of what was done; they name what was installed at the time.
_RECORDS = {"CHANGELOG.md", "bench/LOG.md"}
_CODE_SPAN = re.compile(r"`([^`]*\bpip\s+install\b[^`]*)`")
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINE = re.compile(
    r"^[ #$]*((?:python3 -m venv \S+ && )?[\w./-]*\bpip install .*?)(?: {2,}.*)?$", re.MULTILINE
)


@dataclass(frozen=True)
class InstallLine:
    """A command for a shell, in a clone of the repository."""

    file: str
    command: str

    def __str__(self) -> str:
        return f"{self.file}: {self.command}"


def install_lines() -> list[InstallLine]:
    """All installation commands in documents and in the docstrings of programs."""
    found = list[InstallLine]()
    for path in DOCUMENTS:
        if relative(path) not in _RECORDS:
            found += [
                InstallLine(relative(path), command) for command in _of_document(path.read_text("utf-8"))
            ]
    for folder in ("bench", "examples", "scripts", "deploy"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".sh", ".yaml"):
                found += [
                    InstallLine(relative(path), match[1]) for match in _LINE.finditer(path.read_text("utf-8"))
                ]
    return found


def _of_document(text: str) -> Iterator[str]:
    for fence in _FENCE.finditer(text):
        for match in _LINE.finditer(fence[0]):
            yield match[1].partition("  #")[0].rstrip()
    for match in _CODE_SPAN.finditer(_FENCE.sub("", text)):
        yield " ".join(match[1].split())


def sources() -> Iterator[Path]:
    """The files of the package and the server, whose messages come from `install_line`."""
    for folder in ("orca_jax", "server"):
        yield from sorted((ROOT / folder).rglob("*.py"))
