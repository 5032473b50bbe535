"""What is told to the person at the terminal beside a command's result."""

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader of stderr has left: what there is to tell is lost, what there is to do is not."""
        self.quiet = True


class Notes:
    """Lines on stderr, dim where that is a terminal."""

    def __init__(self) -> None:
        self.console: Console = _Console(stderr=True, highlight=False)

    def __call__(self, text: str, *, style: str = "dim") -> None:
        """Write a line, as it is."""
        self.console.out(text, style=style, highlight=False)
