"""An option: a field of an options dataclass, as a flag, a variable or a key in a file stands for it."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_TRUTH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_ALLOWED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a file's path",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """What a field says of itself: its name and default, how a text becomes its value, its line in `--help`.

    An `optional` one may be None, written `none`. `choices` are the texts it may be; empty: any of its kind.
    """

    name: str
    kind: Callable[[str], Any]
    default: Any
    help: str
    group: str = "options"
    optional: bool = False
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """Its flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """What its value may be, for the end of a message."""
        allowed = f"one of {', '.join(self.choices)}" if self.choices else _ALLOWED[self.kind]
        return f"{allowed}, or none" if self.optional else allowed

    @property
    def full_help(self) -> str:
        """Its line in `--help`, which says the default once."""
        if "(default:" in self.help:
            return self.help
        default = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        if self.default is None or isinstance(self.default, bool):
            default = default.lower()
        return f"{self.help} (default: {default})"

    def parse(self, text: str) -> Any:
        """The value that `text` stands for; raises ValueError, which says what is allowed."""
        if self.optional and text.lower() == "none":
            return None
        if self.choices and text not in self.choices:
            raise ValueError(f"invalid choice: {text!r}; it must be {self.allowed}")
        try:
            return _TRUTH[text.lower()] if self.kind is bool else self.kind(text)
        except (KeyError, ValueError) as error:
            kind = getattr(self.kind, "__name__", "")
            raise ValueError(f"invalid {kind} value: {text!r}; it must be {self.allowed}") from error


def option(name: str, hint: Any, default: Any, text: str, group: str = "options") -> Option:
    """The option of a field with the annotation `hint`: bool, int, float, str, Path or a Literal of texts.

    Each may be a union with None.
    """
    kinds = get_args(hint) if NoneType in get_args(hint) else (hint,)
    (kind,) = (one for one in kinds if one is not NoneType)
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
    """One for each field of a dataclass like those of config.py, in order.

    A field is `Annotated[hint, help]`, or `Annotated[hint, help, group]` where it does not belong to `group`.
    """
    hints = get_type_hints(config, include_extras=True)
    return tuple(
        option(field.name, hint, field.default, text, *(own or [group]))
        for field in fields(config)
        for hint, text, *own in [get_args(hints[field.name])]
    )
