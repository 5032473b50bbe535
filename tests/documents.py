"""The repository's documents, and the code blocks in them."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.places import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_OPTIONAL = re.compile(r"\[(--[^\]]*)\]")
_ONE_OF = re.compile(r"([\w.-]+)(\|[\w.-]+)+")
_ASSIGNED = re.compile(r"\w+=")


@dataclass(frozen=True)
class Block:
    """A block of code between fences; `line` is where its first line is."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def first(self) -> str:
        return self.text.splitlines()[0]

    def commands(self) -> Iterator[list[str]]:
        """The words of each command in a shell block, or after each `$` in a console block."""
        text = self.text.replace("\\\n", " ")
        for line in text.splitlines():
            if self.language == "console":
                if not line.startswith("$ "):
                    continue
                line = line[2:]
            for command in re.split(r" && ", line):
                words = shlex.split(command, comments=True)
                if words:
                    yield words


def relative(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def blocks(*languages: str) -> list[Block]:
    """All blocks of these languages, in all documents."""
    found = list[Block]()
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            if match[2] in languages:
                line = text.count("\n", 0, match.start()) + 2
                found.append(Block(relative(document), line, match[2], textwrap.dedent(match[3])))
    return found


def orca_arguments(words: list[str]) -> list[str] | None:
    """The arguments of a command line of `orca`; None for another command.

    Optional arguments are included, and the first of `a|b`.
    """
    while words and _ASSIGNED.match(words[0]):
        words = words[1:]
    if not words or words[0].split("/")[-1] != "orca":
        return None
    line = _OPTIONAL.sub(r"\1", "\0".join(words[1:]))
    return [match[1] if (match := _ONE_OF.fullmatch(word)) else word for word in line.split("\0")]
