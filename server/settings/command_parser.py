"""A parser whose errors are one line and suggest what was probably meant."""

import argparse
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from orca_jax.errors import did_you_mean
from server.errors import UsageError

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # what argparse takes for a negative number


class CommandParser(argparse.ArgumentParser):
    """Reports a mistake as UsageError. `commands` has the parsers of all commands by name.

    argparse looks for arguments that are missing before flags that do not exist. A misspelled flag is often
    both, so here it comes first.
    """

    commands: Mapping[str, argparse.ArgumentParser] = MappingProxyType({})
    is_command = True  # rather than what has the commands

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse as argparse does, after a look for flags and commands that do not exist."""
        for word in sys.argv[1:] if args is None else args:
            if word == "--":
                break
            if not self.is_command and not word.startswith("-"):
                if word not in self.commands:
                    known = f"{did_you_mean(word, self.commands)}; it is one of {', '.join(self.commands)}"
                    self.error(f"there is no command {word!r}{known}")
                break  # its own parser reads the rest
            self._check_flag(word)
        return super().parse_known_args(args, namespace)

    def _check_flag(self, word: str) -> None:
        """Raise UsageError for a word that argparse would take for a flag and not find."""
        if len(word) < 2 or not word.startswith("-") or " " in word or _NUMBER.fullmatch(word):
            return
        name, known = word.partition("=")[0], self._option_string_actions
        if name in known or (not name.startswith("--") and name[:2] in known):  # -n8 is -n 8
            return
        others = [f"`orca {each}`" for each, parser in self.commands.items() if name in shown_flags(parser)]
        if others:
            self.error(f"{name} is a flag of {' and '.join(others)}, not of `{self.prog}`")
        long = [each for each in known if each.startswith("--")]
        self.error(f"{name} is not a flag of `{self.prog}`{did_you_mean(name, long, prefix='--')}")


def shown_flags(parser: argparse.ArgumentParser) -> set[str]:
    """The flags in the parser's `--help`."""
    actions = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    return {name for action in actions for name in action.option_strings}
