"""Declares an option once, as an annotated field of a dataclass, and derives everything else from it.

    max_queue: Annotated[int, "maximum number of waiting requests", "limits", Whole(1, 1 << 30)] = 1024

After the type a field's annotation has the help, then the group in `--help` if it is not the dataclass's
usual one, then in any order checks and the classes below. The signature of `LLM`, the flags, the `ORCA_*`
variables and the keys of the `--config` file (server/settings), Ray's settings, and the reference page
Options (scripts/site/options.py) are all made from these declarations.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from orca_jax.errors import ConfigError, did_you_mean

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
Check = Callable[[str, Any], None]


class Served(NamedTuple):
    """The default of `orca serve` and Ray, if it differs from the default of `LLM`."""

    default: Any


class Named(NamedTuple):
    """The option's name, if it differs from the field's name."""

    name: str


class Or(NamedTuple):
    """The form of values other than the choices. The option's type is a union of the choices and str."""

    form: str


class _Names(tuple[str, ...]):
    def __new__(cls, *names: str) -> Self:
        return super().__new__(cls, names)


class In(_Names):
    """The commands with the option's flag, in place of the usual ones; without any, only `LLM` has it."""


class Also(_Names):
    """Commands with the option's flag, in addition to the usual ones."""


class Hidden(_Names):
    """Values for tests, which no command offers."""


def pairs(text: str) -> dict[str, str]:
    """The pairs of "NAME=VALUE,NAME=VALUE". Raises ValueError."""
    each = [pair.strip().partition("=") for pair in text.split(",")]
    found = {name: value for name, _, value in each if name and value}
    if len(found) < len(each):
        raise ValueError(f"{text!r} needs names and values, and each name once")
    return found


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_ALLOWED: dict[Callable[[str], Any], str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a file's path",
    tuple: "a text",
    pairs: "NAME=VALUE, several separated by commas",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option. If `optional`, the text `none` means None. Empty `choices`: any value of its type.

    `path` leads to its field: more than one name for a field of a dataclass inside the dataclass. `served` is
    the default of `orca serve`.
    """

    name: str
    path: tuple[str, ...]
    kind: Callable[[str], Any]
    default: Any
    served: Any
    help: str
    group: str = "options"
    commands: tuple[str, ...] = ()
    optional: bool = False
    choices: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    other: str = ""  # the form of further values
    checks: tuple[Check, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "ORCA_" + self.name.upper()

    @property
    def allowed(self) -> str:
        """The allowed values, for an error message."""
        allowed = f"one of {', '.join(self.shown_choices)}" if self.choices else _ALLOWED[self.kind]
        return f"{allowed}, or none" if self.optional else allowed

    @property
    def shown_choices(self) -> tuple[str, ...]:
        return (*self.choices, self.other) if self.other else self.choices

    @property
    def full_help(self) -> str:
        """The line in `--help`, with the default."""
        return self.help if "(default:" in self.help else f"{self.help} (default: {shown(self.default)})"

    def parse(self, text: str) -> Any:
        """The value of `text`. Raises ValueError, which states the allowed values."""
        if self.optional and text.lower() == "none":
            return None
        if self.choices and text not in self.choices and not (self.other and ":" in text):
            raise ValueError(f"invalid choice: {text!r}; it must be {self.allowed}")
        if self.kind is tuple:
            return tuple(each.strip() for each in text.split(","))
        try:
            return _parse_bool(text) if self.kind is bool else self.kind(text)
        except ValueError as error:
            kind = getattr(self.kind, "__name__", "")
            raise ValueError(f"invalid {kind} value: {text!r}; it must be {self.allowed}") from error

    def check(self, value: Any) -> None:
        """Raise ConfigError unless the field may have this value."""
        if value is None and self.optional:
            return
        if value in self.choices or value in self.hidden:
            return
        if self.choices and not (self.other and ":" in str(value)):
            names = ", ".join((*self.shown_choices, *self.hidden))
            raise ConfigError(f"{self.name} is {value!r}; it must be one of {names}")
        if self.kind is bool and not isinstance(value, bool):
            raise ConfigError(f"{self.name} is {value!r}; it must be True or False")
        if self.kind is int and not self.checks and (not isinstance(value, int) or isinstance(value, bool)):
            allowed = "a whole number or None" if self.optional else "a whole number"
            raise ConfigError(f"{self.name} is {value!r}; it must be {allowed}")
        for check in self.checks:
            check(self.path[-1], value)


def shown(default: Any) -> str:
    """A default as `--help` shows it."""
    if isinstance(default, float):
        return f"{default:g}"
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def _parse_bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError
    return text.lower() in _TRUE


def option(
    name: str,
    hint: Any,
    default: Any,
    *metadata: Any,
    group: str = "options",
    commands: tuple[str, ...] = (),
    outside: tuple[str, ...] = (),
) -> Option:
    """The option of a field of type `hint` with this metadata in its annotation.

    The type is bool, int, float, str, Path, Sequence[str], a Mapping of strings or a Literal of strings, or
    a union of one of them with None; of several others the first is what a text becomes.
    """
    kinds: tuple[Any, ...] = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kind = next(each for each in kinds if each is not NoneType)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if get_origin(kind) is Sequence:
        kind = tuple
    if get_origin(kind) is Mapping:
        kind = pairs
    made = Option(
        name=name,
        path=(*outside, name),
        kind=str if choices or kind is Any else kind,
        default=default,
        served=default,
        help="",
        group=group,
        commands=commands,
        optional=NoneType in kinds or kind is Any,
        choices=choices,
    )
    for each in metadata:
        match each:
            case str() if made.help:
                made = replace(made, group=each)
            case str():
                made = replace(made, help=each)
            case Served():
                made = replace(made, served=each.default)
            case Named():
                made = replace(made, name=each.name)
            case Also():
                made = replace(made, commands=(*commands, *each))
            case Or():
                made = replace(made, other=each.form)
            case Hidden():
                made = replace(
                    made, choices=tuple(value for value in choices if value not in each), hidden=tuple(each)
                )
            case In():
                made = replace(made, commands=tuple(each))
            case _:
                made = replace(made, checks=(*made.checks, each))
    return made


@cache
def options_of(
    config: type, group: str = "options", commands: tuple[str, ...] = (), outside: tuple[str, ...] = ()
) -> tuple[Option, ...]:
    """One option for each annotated field of a dataclass, and of dataclasses inside it, in order.

    An option belongs to `group` and has a flag in `commands` unless its annotation says otherwise. A field
    that a subclass narrows, as from `int | None` to int, keeps its annotation.
    """
    annotations = _annotations(config)
    hints = get_type_hints(config)
    options = list[Option]()
    for field in fields(config):
        hint = hints[field.name]
        if isinstance(hint, type) and is_dataclass(hint):
            options += options_of(hint, group, commands, (*outside, field.name))
        elif field.name in annotations:
            options.append(
                option(
                    field.name,
                    hint,
                    field.default,
                    *annotations[field.name],
                    group=group,
                    commands=commands,
                    outside=outside,
                )
            )
    return tuple(options)


def _annotations(config: type) -> dict[str, tuple[Any, ...]]:
    """The metadata in the fields' annotations; a field without any has that of its base class."""
    found = dict[str, tuple[Any, ...]]()
    for base in reversed(config.__mro__):
        for name, hint in vars(base).get("__annotations__", {}).items():
            if get_origin(hint) is Annotated:
                found[name] = hint.__metadata__
    return found


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # only a base: quicker to make
class Options:
    """A dataclass of options. Raises ConfigError when made with a value that an option may not have."""

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            if len(each.path) == 1:  # a dataclass inside has checked its own
                each.check(getattr(self, each.path[0]))

    @classmethod
    def part_of(cls, config: "Options") -> Self:
        """Make this configuration from the same fields of a larger one."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


def takes(config: Callable[P, T]) -> Callable[[Callable[[S, T], None]], Callable[Concatenate[S, P], None]]:
    """Make a constructor that takes a dataclass of options take the options themselves.

    Type checkers and editors see each option by its name, with its type and default, and `help` describes it.
    A name that does not exist is a TypeError.
    """

    def decorate(start: Callable[[S, T], None]) -> Callable[Concatenate[S, P], None]:
        def __init__(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            for name in kwargs:
                if name not in names:
                    raise TypeError(f"{name!r} is not an option{did_you_mean(name, names)}")
            start(self, config(*args, **kwargs))

        signature = inspect.signature(config)
        names = list(signature.parameters)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        vars(__init__)["__signature__"] = signature.replace(
            parameters=[itself, *signature.parameters.values()]
        )
        described = [f"{'.'.join(each.path)}: {each.help}" for each in options_of(cast("type", config))]
        __init__.__doc__ = "\n\n".join(described)
        return __init__

    return decorate


def build(config: type[T], values: Mapping[str, Any], **others: Any) -> T:
    """The dataclass `config` with the options in `values`, by their names, and with the fields in `others`.

    Options that `values` lacks have their defaults, and those that `config` lacks are left out. Raises
    ConfigError if `config` does.
    """
    arguments = dict[str, Any]()
    inside = dict[str, dict[str, Any]]()
    for each in options_of(config):
        if each.name in values:
            (*outside, name) = each.path
            (inside.setdefault(outside[0], {}) if outside else arguments)[name] = values[each.name]
    hints = get_type_hints(config)
    for name, part in inside.items():
        arguments[name] = hints[name](**part)
    return config(**arguments, **others)


def values_of(config: object) -> dict[str, Any]:
    """The value of each option of `config`, by its name: what `build` takes."""
    values = dict[str, Any]()
    for each in options_of(type(config)):
        value: Any = config
        for name in each.path:
            value = getattr(value, name)
        values[each.name] = value
    return values
