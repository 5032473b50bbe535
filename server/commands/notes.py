"""Messages on stderr, apart from a command's result on stdout."""

from io import TextIOBase
from typing import IO, cast

from rich.console import Console


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
