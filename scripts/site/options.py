"""The reference of the options, from their declarations."""

import re

from orca_jax.config import EngineConfig
from orca_jax.options import Option, options_of, shown
from scripts.site.markdown import cell, code, table
from server.settings.flags import ALL_OPTIONS, GROUPS

_HEAD = """# Options

Each option has one name. In Python it is an argument, `LLM(max_batch_size=64)`; on the command line a flag,
`--max-batch-size 64`; in the environment of `orca serve` and `orca compile` a variable,
`ORCA_MAX_BATCH_SIZE=64`; in a `--config` file and in the arguments of [Ray's application](../scale-out.md) a
key, `max_batch_size: 64`. A flag goes before a variable, and that before the file. `none` unsets an option
whose values include it.

The last column names the commands that have the flag, and `LLM` where it is an argument in Python, or a field
of one, as in `LLM(deadlines=Deadlines(ready_seconds=60))`.
"""


_ARGUMENTS = {option.name: ".".join(option.path) for option in options_of(EngineConfig)}


def options_page() -> str:
    """All options by group: values, defaults, meaning, and who has them."""
    groups = dict.fromkeys((*GROUPS, *(option.group for option in ALL_OPTIONS)))
    parts = [_HEAD]
    for group in groups:
        rows = [_row(option) for option in ALL_OPTIONS if option.group == group]
        parts += [f"## {group.capitalize()}\n", table(("option", "values", "default", "meaning", "of"), rows)]
    return "\n".join(parts)


def _row(option: Option) -> tuple[str, ...]:
    described = re.fullmatch(r"(.*?)(?: \(default: (.*)\))?", option.help)
    assert described is not None
    meaning, default = described.groups()
    default = code(shown(option.default)) if default is None else cell(default)
    if option.served != option.default:
        default += f"; of `orca serve` {code(shown(option.served))}"
    owners = [code(each) for each in option.commands]
    argument = _ARGUMENTS.get(option.name)
    if argument is not None:
        owners.insert(0, "`LLM`" if argument == option.name else f"`LLM` (`{argument}`)")
    return code(option.name), cell(option.allowed), default, cell(meaning), ", ".join(owners)
