"""`orca chat`: a conversation with a model, in the terminal or through a pipe."""

import argparse
import io
import os
import sys
from pathlib import Path

from orca_jax.config import EngineConfig
from orca_jax.errors import InvalidRequest, NotSupported, OutputFailed, QueueFull
from orca_jax.model_files.found_model import DEMO_MODEL, check_model
from orca_jax.request.chat.template_files import load_chat_template
from server.commands.chat_commands import COMMANDS, Quit, run_command
from server.commands.chat_session import UNLIMITED, Chat
from server.commands.loading import load, summary
from server.commands.notes import Notes
from server.commands.replies import Replies
from server.commands.typed_lines import Typed, TypedLines
from server.errors import UsageError
from server.settings.flags import engine_options
from server.settings.sampling_flags import sampling_params

_NO_TEMPLATE = "give one with --chat-template FILE, or continue text with `orca generate`"
_WELCOME = "/help lists the commands; Ctrl-C stops a reply, Ctrl-D ends"


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    # Mistakes in the flags and in the model's files are reported before JAX is imported.
    sampling_params(args, {"max_tokens": UNLIMITED})
    engine = EngineConfig.of(**engine_options(args))
    check_model(engine)
    _check_template(engine, args.chat_template)
    notes = Notes()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for what the terminal cannot encode
    completions = [f"/{name}" for name in COMMANDS]
    with load(notes, engine) as llm, TypedLines(history=_history_file(), completions=completions) as lines:
        replies = Replies(
            llm,
            chat_template=args.chat_template,
            reasoning_format=args.reasoning_format,
            advice=_NO_TEMPLATE,
        )
        replies.prompts.template()  # or there is nothing to talk to
        if lines.is_terminal:
            notes(summary(llm))
            notes(_WELCOME)
        _talk(Chat(llm, replies, args, notes, is_terminal=lines.is_terminal), lines)
    return 0


def _check_template(engine: EngineConfig, file: Path | None) -> None:
    """Raise for a mistake in the template, or if a model on this machine has none."""
    if file is not None:
        load_chat_template(None, file)
        return
    place = engine.tokenizer or engine.model or DEMO_MODEL
    directory = Path(str(place)).expanduser()
    if directory.is_dir() and load_chat_template(directory, None) is None:
        raise NotSupported(f"{place} has no chat template; {_NO_TEMPLATE}", param="messages")


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "orca" / "chat_history"


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
