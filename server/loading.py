"""Loading a model, with a progress bar by bytes where stderr is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

import orca_jax
from orca_jax.cost_model import parameter_count
from server.notes import Notes

if TYPE_CHECKING:
    from orca_jax import LLM


@contextmanager
def bytes_bar(notes: Notes, text: str) -> Iterator[Callable[[int, int], None]]:
    """Something to tell bytes done and in all; a bar without an end until it is first told."""
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


def load(notes: Notes, **options: Any) -> "LLM":
    """An LLM with these options."""
    with bytes_bar(notes, "Loading the model") as show:
        return orca_jax.LLM(**options, on_load=show, on_event=notes)


def summary(llm: "LLM") -> str:
    """A line that says what was loaded."""
    size = parameter_count(llm.config) / 1e6
    return f"{llm.name}: {size:,.1f} million parameters, {llm.dtype}, {llm.device}"
