"""Messages on stderr, apart from a command's result on stdout."""

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader of stderr is gone: drop further messages, but let the command finish."""
        self.quiet = True


class Notes:
    """Lines on stderr, dim if it is a terminal."""

    def __init__(self) -> None:
        self.console: Console = _Console(stderr=True, highlight=False)

    def __call__(self, text: str, *, style: str = "dim") -> None:
        """Write a line, without interpreting markup."""
        self.console.out(text, style=style, highlight=False)
