"""The commands of `orca chat`: lines that begin with a slash."""

import argparse
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from orca_jax.errors import did_you_mean
from server.commands.chat_session import Chat
from server.errors import UsageError
from server.settings.sampling_flags import CHAT_FIELDS, chat_flags

_HELP = """\
A line is a message. End it with \\ to continue in the next line, or write several lines
between triple quotes (\"\"\"). A message that begins with / has it twice.
"""


class Quit(Exception):
    """The user ends the conversation."""


class Command(NamedTuple):
    """A command: the form of its argument, what it does, and the function that does it."""

    argument: str
    help: str
    run: Callable[[Chat, str], None]


def run_command(chat: Chat, line: str) -> None:
    """Run the command in `line`, which is without its slash.

    Raises UsageError, Quit, or what a reply raises.
    """
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        hint = did_you_mean(name, COMMANDS) or "; /help lists them, and // begins a message with a slash"
        raise UsageError(f"/{name[:80]} is not a command{hint}")
    argument = argument.strip()
    if argument and not command.argument:
        raise UsageError(f"/{name} takes nothing after it")
    command.run(chat, argument)


def _help(chat: Chat, argument: str) -> None:
    forms = {f"/{name} {command.argument}".rstrip(): command.help for name, command in COMMANDS.items()}
    width = max(map(len, forms))
    chat.note(_HELP + "\n".join(f"{form:{width}}  {text}" for form, text in forms.items()))


def _system(chat: Chat, text: str) -> None:
    if not text:
        chat.note("there is no system prompt" if chat.system is None else chat.system)
        return
    chat.system = None if text == '""' else text
    chat.note("the system prompt is removed" if chat.system is None else "the system prompt is set")


def _clear(chat: Chat, argument: str) -> None:
    chat.messages.clear()
    chat.note("a new conversation" + ("" if chat.system is None else ", with the same system prompt"))


def _undo(chat: Chat, argument: str) -> None:
    if not chat.messages:
        raise UsageError("there is nothing to undo")
    del chat.messages[-2:]
    chat.note(f"the last message and its reply are dropped; {len(chat.messages) // 2} are left")


def _retry(chat: Chat, argument: str) -> None:
    if not chat.messages:
        raise UsageError("there is no reply to try again")
    earlier = chat.messages.pop()
    replied = False
    try:
        replied = chat.reply()
    finally:
        if not replied:
            chat.messages.append(earlier)
    if not replied:
        chat.note("stopped; the earlier reply stays")


def _set(chat: Chat, text: str) -> None:
    """Read the value as the command line's flag does."""
    if not text:
        chat.note(_settings(chat))
        return
    name, *values = _words(text)
    name = name.removeprefix("--").replace("-", "_")
    if name not in CHAT_FIELDS:
        raise UsageError(f"/set knows no {name[:80]}{did_you_mean(name, CHAT_FIELDS)}; /set alone lists all")
    if not values:
        raise UsageError(f"/set {name} lacks its value; `default` is one too")
    before = chat.flags
    chat.flags = _with_flag(before, name, values)
    try:
        chat.sampling()
    except BaseException:
        chat.flags = before
        raise
    chat.note(_settings(chat, name))


def _with_flag(flags: argparse.Namespace, name: str, values: list[str]) -> argparse.Namespace:
    changed = argparse.Namespace(**vars(flags))
    parser = chat_flags()
    if hasattr(changed, name):
        delattr(changed, name)
    if values == ["default"]:
        given: list[str] = []
    elif values in (["true"], ["false"]) and name in _SWITCHES:
        given = [f"--{'' if values == ['true'] else 'no-'}{name}".replace("_", "-")]
    else:
        given = [f"--{name.replace('_', '-')}={value}" for value in values]
    try:
        return parser.parse_args(given, changed)
    except argparse.ArgumentError as error:
        raise UsageError(str(error).removeprefix("argument ")) from error


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"/set {text[:80]}: {error}") from error


def _settings(chat: Chat, only: str | None = None) -> str:
    sampling = chat.sampling()
    shown = dict[str, object]()
    for name in CHAT_FIELDS:
        shown[name] = getattr(sampling, name)
    shown["max_tokens"] = getattr(chat.flags, "max_tokens", None) or "as many as fit"
    names = CHAT_FIELDS if only is None else (only,)
    return "\n".join(f"{name} {shown[name]}" for name in names)


def _save(chat: Chat, name: str) -> None:
    """Write the messages as a line that `orca generate --input` reads."""
    if not name:
        raise UsageError("/save lacks the name of a file")
    line = json.dumps({"messages": chat.all_messages()}, ensure_ascii=False)
    try:
        with open(Path(name).expanduser(), "x", encoding="utf-8") as file:
            file.write(f"{line}\n")
    except FileExistsError as error:
        raise UsageError(f"{name} exists; name another file") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} cannot be written: {getattr(error, 'strerror', error)}") from error
    chat.note(f"{len(chat.messages)} messages are in {name}")


def _stats(chat: Chat, argument: str) -> None:
    if chat.statistics is None:
        raise UsageError("there is no reply yet")
    chat.note(str(chat.statistics))


def _quit(chat: Chat, argument: str) -> None:
    raise Quit


_SWITCHES = ("ignore_eos", "guided_json_object")

COMMANDS: Mapping[str, Command] = {
    "help": Command("", "show this", _help),
    "system": Command("[TEXT]", 'show the system prompt, or set it; "" removes it', _system),
    "clear": Command("", "begin a new conversation", _clear),
    "undo": Command("", "drop the last message and its reply", _undo),
    "retry": Command("", "reply to the last message again", _retry),
    "set": Command(
        "[NAME VALUE]", "show the sampling parameters, or set one, as in /set temperature 0.7", _set
    ),
    "stats": Command("", "show tokens and speed of the last reply", _stats),
    "save": Command("FILE", "write the conversation to a JSONL file, for `orca generate --input`", _save),
    "quit": Command("", "end, as Ctrl-D does", _quit),
}
