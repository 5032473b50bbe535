"""Loads the model of `orca chat` and answers what the user types, or a pipe has, until it ends."""

import argparse
import io
import os
import sys
from pathlib import Path

from orca_jax.config import EngineConfig
from orca_jax.errors import InvalidRequest, OutputFailed, QueueFull
from server.commands.chat_commands import COMMANDS, Quit, run_command
from server.commands.chat_session import Chat
from server.commands.loading import load, summary
from server.commands.notes import Notes
from server.commands.replies import Replies
from server.commands.typed_lines import Typed, TypedLines
from server.errors import UsageError

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
