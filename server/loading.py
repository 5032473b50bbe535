"""Loading a model, with a progress bar by bytes where stderr is a terminal."""

from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

import orca_jax
from orca_jax.cost_model import parameter_count
from server.notes import Notes

if TYPE_CHECKING:
    from orca_jax import LLM


def load(notes: Notes, **options: Any) -> "LLM":
    """An LLM with these options. A bar without an end until the first weights are read, then one by bytes."""
    bar = Progress(
        TextColumn("{task.description}", style="dim"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=notes.console,
        disable=not notes.console.is_terminal,
        transient=True,
    )
    task = bar.add_task("Loading the model", total=None)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    with bar:
        return orca_jax.LLM(**options, on_load=show)


def summary(llm: "LLM") -> str:
    """A line that says what was loaded."""
    size = parameter_count(llm.config) / 1e6
    return f"{llm.name}: {size:,.1f} million parameters, {llm.dtype}, {llm.device}"
