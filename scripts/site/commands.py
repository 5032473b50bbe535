"""The reference of the commands, from their argument parsers."""

import argparse
import re
from collections.abc import Iterator, Mapping

from scripts.site.markdown import cell, code, table
from server.cli import parser

# What argparse has no public name for: a parser's groups and its commands.
_GROUPS, _ACTIONS = "_action_groups", "_group_actions"


def command_parsers() -> Mapping[str, argparse.ArgumentParser]:
    """Each command's parser by its name."""
    top = parser()
    for action in getattr(top, "_actions"):  # noqa: B009
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    raise AssertionError("orca has commands")


def command_pages() -> Iterator[tuple[str, str]]:
    """A page for each command: its name and its Markdown."""
    for name, command in command_parsers().items():
        yield name, _page(name, command)


def _page(name: str, command: argparse.ArgumentParser) -> str:
    usage = re.sub(r"\s+", " ", command.format_usage().removeprefix("usage: ")).strip()
    if len(usage) > 200:
        usage = f"orca {name} [PROMPT ...] [FLAGS]" if "PROMPT" in usage else f"orca {name} [FLAGS]"
    parts = [f"# orca {name}\n", f"```text\n{usage}\n```\n", _prose(command.description), ""]
    for group in getattr(command, _GROUPS):
        shown = [each for each in getattr(group, _ACTIONS) if each.help != argparse.SUPPRESS]
        rows = [_row(action) for action in shown if action.dest != "help"]
        if rows:
            parts += [f"## {str(group.title).capitalize()}\n", table(("flag", "value", "meaning"), rows)]
    parts.append(_prose(command.epilog))
    return "\n".join(parts)


def _row(action: argparse.Action) -> tuple[str, str, str]:
    names = ", ".join(code(name) for name in action.option_strings) or code(str(action.metavar))
    value = "" if not action.option_strings or action.nargs == 0 else str(action.metavar or "")
    if value.startswith("{"):
        value = value.strip("{}").replace(",", "|")
    return names, code(value), cell((action.help or "").replace("%%", "%"))


def _prose(text: str | None) -> str:
    return cell((text or "").replace("%%", "%"))
