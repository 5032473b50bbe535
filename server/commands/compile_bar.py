"""A progress bar for compiling, shown if stderr is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.commands.notes import Notes


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
