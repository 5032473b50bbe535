"""`orca completion`: prints a shell's script, made from the commands' parsers."""

import argparse

import shtab

from server.parser import parser

_FILES = ("FILE", "SRC", "DST", "MODEL")  # how metavars of paths begin


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """The completion script for bash, zsh or fish."""
    top = parser()
    for command in top.commands.values():
        for action in command._actions:
            _describe(action)
    return shtab.complete(top, shell)


def _describe(action: argparse.Action) -> None:
    """Set an argument's choices, which shtab cannot see in our parsers' own conversions."""
    shown = action.metavar if isinstance(action.metavar, str) else ""
    if shown.startswith("{"):
        names = shown.strip("{}").split(",")
        action.choices = [name for name in names if ":" not in name]  # with a colon: a form, not a value
    elif shown.startswith(_FILES):
        setattr(action, "complete", shtab.FILE)  # noqa: B010
