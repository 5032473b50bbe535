"""Progress bars, shown if stderr is a terminal: for bytes, and for compiled programs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from server.commands.notes import Notes


@contextmanager
def bytes_bar(notes: Notes, text: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that takes the bytes done and their total."""
    bar = Progress(
        TextColumn("{task.description}", style="dim"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=notes.console,
        disable=not notes.console.is_terminal,
        transient=True,
    )
    task = bar.add_task(text, total=None)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    with bar:
        yield show


@contextmanager
def programs_bar(notes: Notes) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function that takes the programs done, their total, and the name of the one begun last."""
    bar = Progress(
        TextColumn("Compiling", style="dim"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", style="dim"),
        console=notes.console,
        disable=not notes.console.is_terminal,
        transient=True,
    )
    task = bar.add_task("", total=None)

    def show(done: int, total: int, name: str) -> None:
        bar.update(task, completed=done, total=total, description=name)

    with bar:
        yield show
