"""The `--config` file of `orca serve`: a YAML mapping of option names to values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from orca_jax.errors import did_you_mean
from orca_jax.options import Option
from orca_jax.small_files import read_text
from server.errors import UsageError
from server.settings.foreign_flags import about

_MAX_BYTES = 1_000_000
_YAML = "tag:yaml.org,2002:"
_SCALAR_TAGS = {_YAML + kind for kind in ("str", "int", "float", "bool", "null", "timestamp")}


def read_settings(path: Path, options: Mapping[str, Option]) -> dict[str, Any]:
    """The file's values by option name. Raises UsageError, which gives the file and the line."""
    root = _parse(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path} holds {_kind(root)}; it must hold lines such as 'port: 8000'")
    values = dict[str, Any]()
    for key, value in root.value:
        name = key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else ""
        where = f"{path}, line {key.start_mark.line + 1}"
        if name not in options:
            shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else _kind(key)
            raise UsageError(f"{where}: {shown} is not a setting{about(name) or did_you_mean(name, options)}")
        if name in values:
            raise UsageError(f"{where}: {name} appears twice; give it once")
        try:
            values[name] = _value(options[name], value)
        except ValueError as error:
            raise UsageError(f"{where}: {name}: {error}") from error
    return values


def _parse(path: Path) -> yaml.Node | None:
    try:
        text = read_text(path, _MAX_BYTES)
    except ValueError as error:
        raise UsageError(f"the settings: {error}") from error
    try:
        # Only composed: scalars stay text, as in a flag, so that `off` is not read as a boolean.
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise UsageError(f"{path}{line}: invalid YAML: {error.problem}") from error
    except RecursionError as error:
        raise UsageError(f"{path}: invalid YAML: it is nested too deeply") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UsageError(f"{path}: invalid YAML: {error}") from error


def _value(option: Option, node: yaml.Node) -> Any:
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALAR_TAGS:
        raise ValueError(f"it is {_kind(node)}; it must be {option.allowed}")
    if node.tag == _YAML + "null":
        if not option.optional:
            raise ValueError(f"there is no value; it must be {option.allowed}")
        return None
    return option.parse(node.value)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "a single value" if node.tag in _SCALAR_TAGS else f"a value with the tag {node.tag!r}"
