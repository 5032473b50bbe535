"""Loads the model of `orca chat` and answers what the user types, or a pipe has, until it ends."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from orca_jax.config import EngineConfig
from orca_jax.errors import InvalidPrompt, InvalidRequest, OutputFailed, QueueFull
from server.commands.chat_commands import COMMANDS, Quit, run_command
from server.commands.chat_session import Chat
from server.commands.loading import load, summary
from server.commands.notes import Notes
from server.commands.replies import Replies
from server.errors import UsageError

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


_WELCOME = "/help lists the commands; Ctrl-C stops a reply, Ctrl-D ends"


def load_and_talk(args: argparse.Namespace, engine: EngineConfig, *, no_template: str) -> int:
    """Talk until the end; returns the exit status. `no_template` is advice for a model without a template."""
    notes = Notes()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for what the terminal cannot encode
    completions = [f"/{name}" for name in COMMANDS]
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    lines = TypedLines(history=state / "orca" / "chat_history", completions=completions)
    with load(notes, engine) as llm, lines:
        replies = Replies(
            llm,
            chat_template=args.chat_template,
            reasoning_format=args.reasoning_format,
            advice=no_template,
        )
        replies.prompts.template()  # or there is nothing to talk to
        if lines.is_terminal:
            notes(summary(llm))
            notes(_WELCOME)
        _talk(Chat(llm, replies, args, notes, is_terminal=lines.is_terminal), lines)
    return 0


def _talk(chat: Chat, lines: TypedLines) -> None:
    """Answer each message until the end. At a terminal a mistake ends its message alone."""
    while True:
        try:
            typed = lines.read()
            if typed is None:
                break
            _take(chat, typed)
        except Quit:
            return
        except KeyboardInterrupt:
            if not chat.is_terminal:
                raise
            print()
            chat.note("Ctrl-D or /quit ends")
        except (InvalidRequest, UsageError, OutputFailed, QueueFull) as error:
            if not chat.is_terminal:
                raise
            chat.note(str(error), style="red")
    if chat.is_terminal:
        print()


def _take(chat: Chat, typed: Typed) -> None:
    text = typed.text
    if not text.strip():
        return
    if text.startswith("/") and not typed.is_quoted:
        if not text.startswith("//"):
            run_command(chat, text[1:])
            return
        text = text[1:]
    chat.say(text)
