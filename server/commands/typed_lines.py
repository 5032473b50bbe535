"""Reads messages that a user types, or that a program writes into a pipe."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from orca_jax.errors import InvalidPrompt

try:
    import readline
except ImportError:  # a Python without it
    readline = None

PROMPT, MORE = ">>> ", "... "
_QUOTES = '"""'
_MAX_LINE = 1 << 24
_MAX_HISTORY = 1000  # lines


class Typed(NamedTuple):
    """A message; one that was quoted is never a command."""

    text: str
    is_quoted: bool = False


class TypedLines:
    """Messages from stdin, a line each.

    A line that ends with a backslash continues in the next, and lines between triple quotes are one message.
    At a terminal there is a prompt, and lines can be edited, with a history in the file `history`, if any. A
    context manager.
    """

    def __init__(self, *, history: Path | None = None, completions: Sequence[str] = ()) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._history = history if self.is_terminal and readline is not None else None
        self._completions = completions

    def __enter__(self) -> "TypedLines":
        if self.is_terminal and readline is not None:
            readline.set_completer(self._complete)
            readline.set_completer_delims(" ")
            is_libedit = "libedit" in (readline.__doc__ or "")
            readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
            if self._history is not None and self._history.exists():
                try:
                    readline.read_history_file(self._history)
                except OSError:
                    pass  # what was typed earlier is a convenience
        return self

    def __exit__(self, *_: object) -> None:
        if self._history is None or readline is None:
            return
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))  # for its owner's eyes alone
            readline.set_history_length(_MAX_HISTORY)
            readline.write_history_file(self._history)
        except OSError:
            pass

    def read(self) -> Typed | None:
        """The next message; None at the end. Raises InvalidPrompt for one that is not text, or too long."""
        line = self._line(PROMPT)
        if line is None:
            return None
        if line.startswith(_QUOTES):
            return self._quoted(line.removeprefix(_QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            line = self._line(MORE)
            if line is None:
                break
            lines.append(line)
        return Typed("\n".join(lines))

    def _quoted(self, line: str) -> Typed:
        lines = list[str]()
        while not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            more = self._line(MORE)
            if more is None:
                return Typed("\n".join(lines), is_quoted=True)
            line = more
        lines.append(line.rstrip().removesuffix(_QUOTES))
        return Typed("\n".join(lines).strip("\n"), is_quoted=True)

    def _line(self, prompt: str) -> str | None:
        """A line without its line break, or None."""
        try:
            if self.is_terminal:
                return self._terminal_line(prompt)
            data = sys.stdin.buffer.readline(_MAX_LINE + 1)
            if len(data) > _MAX_LINE:
                raise InvalidPrompt(f"a line of stdin has more than {_MAX_LINE} bytes", param="messages")
            return data.decode("utf-8").rstrip("\r\n") if data else None
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise InvalidPrompt(f"stdin is not UTF-8: {error}", param="messages") from error

    def _terminal_line(self, prompt: str) -> str:
        if sys.stdout.isatty():
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)  # stdout is for the replies
        return input()

    def _complete(self, text: str, state: int) -> str | None:
        return [*(word for word in self._completions if word.startswith(text)), None][state] if text else None
