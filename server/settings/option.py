"""How a dataclass field becomes a flag, an environment variable and a key of the `--config` file."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_ALLOWED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a file's path",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option. If `optional`, the text `none` means None. Empty `choices`: any value of its type."""

    name: str
    kind: Callable[[str], Any]
    default: Any
    help: str
    group: str = "options"
    optional: bool = False
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """The allowed values, for an error message."""
        allowed = f"one of {', '.join(self.choices)}" if self.choices else _ALLOWED[self.kind]
        return f"{allowed}, or none" if self.optional else allowed

    @property
    def full_help(self) -> str:
        """The line in `--help`, with the default."""
        if "(default:" in self.help:
            return self.help
        default = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        if self.default is None or isinstance(self.default, bool):
            default = default.lower()
        return f"{self.help} (default: {default})"

    def parse(self, text: str) -> Any:
        """The value of `text`. Raises ValueError, which states the allowed values."""
        if self.optional and text.lower() == "none":
            return None
        if self.choices and text not in self.choices:
            raise ValueError(f"invalid choice: {text!r}; it must be {self.allowed}")
        try:
            return _parse_bool(text) if self.kind is bool else self.kind(text)
        except ValueError as error:
            kind = getattr(self.kind, "__name__", "")
            raise ValueError(f"invalid {kind} value: {text!r}; it must be {self.allowed}") from error


def _parse_bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError
    return text.lower() in _TRUE


def option(name: str, hint: Any, default: Any, text: str, group: str = "options") -> Option:
    """The option of a field with type `hint`: bool, int, float, str, Path or a Literal of strings, or a union
    of one of these with None.
    """
    kinds = get_args(hint) if NoneType in get_args(hint) else (hint,)
    (kind,) = (kind for kind in kinds if kind is not NoneType)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return Option(
        name=name,
        kind=str if choices else kind,
        default=default,
        help=text,
        group=group,
        optional=NoneType in kinds,
        choices=choices,
    )


def options_of(config: type, group: str = "options") -> tuple[Option, ...]:
    """One option for each field of a dataclass as in options.py, in order.

    An option belongs to `group` unless its annotation names another one.
    """
    hints = get_type_hints(config, include_extras=True)
    options = list[Option]()
    for field in fields(config):
        hint, *metadata = get_args(hints[field.name])
        texts = [each for each in metadata if isinstance(each, str)]  # help, and maybe a group
        options.append(option(field.name, hint, field.default, *([*texts, group][:2])))
    return tuple(options)
