"""Messages and progress bars on stderr, apart from a command's result on stdout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOBase
from typing import IO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader of stderr is gone: drop further messages, but let the command finish."""
        self.quiet = True


class Notes:
    """Lines on stderr, dim if it is a terminal."""

    def __init__(self) -> None:
        self.console: Console = _Console(stderr=True, highlight=False)

    def write_to(self, stream: TextIOBase) -> None:
        """Write to this stream from now on."""
        self.console = _Console(file=cast("IO[str]", stream), highlight=False)

    def __call__(self, text: str, *, style: str = "dim") -> None:
        """Write a line, without interpreting markup."""
        self.console.out(text, style=style, highlight=False)


def progress_bar(console: Console, *columns: ProgressColumn, redirects: bool = True) -> Progress:
    """A bar that is shown if the console is a terminal, and removed at the end.

    With `redirects` it keeps below whatever else is printed meanwhile.
    """
    return Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=True,
        redirect_stdout=redirects,
        redirect_stderr=redirects,
    )


def description() -> TextColumn:
    """The column with a task's text."""
    return TextColumn("{task.description}", style="dim")


@contextmanager
def bytes_bar(notes: Notes, text: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the bytes done and their total."""
    with progress_bar(
        notes.console, description(), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    ) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def programs_bar(notes: Notes) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that takes the programs done, their total, and the name of the one begun last."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), description())
    with progress_bar(notes.console, TextColumn("Compiling", style="dim"), *columns) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)
