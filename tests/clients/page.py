"""The settings and programs of docs/clients.md, which the tests take from there."""

import subprocess
import sys

from tests.documents import ROOT, blocks

PAGE = "docs/clients.md"
ADDRESS = "http://127.0.0.1:8000"
MODEL = "my-model"


def block(heading: str, language: str, url: str) -> str:
    """The first block of a language under a heading, with a server's address."""
    lines = (ROOT / PAGE).read_text(encoding="utf-8").splitlines()
    start = lines.index(f"## {heading}")
    found = next(one for one in blocks(language) if one.document == PAGE and one.line > start)
    assert f"## {heading}" in lines[: found.line] and not any(
        line.startswith("## ") for line in lines[start + 1 : found.line]
    ), f"{heading} has no block of {language}"
    return found.text.replace(ADDRESS, url)


def printed(heading: str, url: str) -> str:
    """Run the page's Python under a heading as a program; return its output."""
    command = [sys.executable, "-c", block(heading, "python", url)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
