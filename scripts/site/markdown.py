"""Pieces of Markdown."""

from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """A table's cell: on one line, without what Markdown or HTML would read in it."""
    line = " ".join(text.split())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")


def code(text: str) -> str:
    """Code in a cell."""
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
