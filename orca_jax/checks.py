"""Checks of configuration values: each raises a ConfigError that says what is allowed."""

import math
import os
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from orca_jax.errors import ConfigError

_MAX_NAME = 256
_ADDRESS = re.compile(r"(?P<host>[\w.-]+|\[[0-9A-Fa-f:]+\]):(?P<port>\d{1,5})", re.ASCII)
_PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def check_seconds(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a number of seconds above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a number of seconds above 0")


def check_timeout(name: str, value: float) -> None:
    """Raises ConfigError unless `value` is above 0 and at most 1e7 seconds."""
    if not 0 < value <= 1e7:
        raise ConfigError(f"{name} is {value:g}; it must be above 0 and at most 1e7 seconds")


def check_fraction(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a number above 0, and at most 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0, and at most 1")


def check_rate(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a number of bytes a second, at least 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a number of bytes a second, at least 1")


def check_place(name: str, value: object) -> None:
    """Raises ConfigError unless `value` has the form "package.file:name"."""
    if not isinstance(value, str) or _PLACE.fullmatch(value) is None:
        raise ConfigError(f"{name} is {value!r}; it must have the form package.file:name")


def host_and_port(name: str, value: object) -> tuple[str, int]:
    """The host and port in "host:port" or "[IPv6 address]:port". Raises ConfigError."""
    found = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if found is None or int(found["port"]) >= 1 << 16 or found["host"] in ("0.0.0.0", "[::]"):
        raise ConfigError(
            f"{name} is {value!r}; it must be host:port or [IPv6 address]:port, with an address of this "
            "machine at which the other servers reach it"
        )
    return found["host"].strip("[]"), int(found["port"])


def check_host_and_port(name: str, value: object) -> None:
    """Raises ConfigError unless `value` has the form "host:port"."""
    host_and_port(name, value)


_DRAFT_MODEL, NEXT_TOKEN_HEAD, _EAGLE3 = "draft:", "mtp", "eagle3:"


def drafting_model(drafter: str) -> str | None:
    """The model that "draft:MODEL" names; None for any other drafter."""
    return drafter.removeprefix(_DRAFT_MODEL) if drafter.startswith(_DRAFT_MODEL) else None


def drafting_head(drafter: str) -> str | None:
    """The directory that "eagle3:DIRECTORY" names; None for any other drafter."""
    return drafter.removeprefix(_EAGLE3) if drafter.startswith(_EAGLE3) else None


def check_drafter(name: str, value: object) -> None:
    """Raises ConfigError unless it is "draft:MODEL", "eagle3:DIRECTORY" or "package.file:name"."""
    if isinstance(value, str) and (drafting_model(value) or drafting_head(value)):
        return
    if value == _DRAFT_MODEL:
        raise ConfigError(f"{name} is {value!r}, without a model; write {_DRAFT_MODEL}MODEL")
    if value == _EAGLE3:
        raise ConfigError(f"{name} is {value!r}, without a head; write {_EAGLE3}DIRECTORY")
    check_place(name, value)


def checked_name(name: str, value: object) -> str:
    """`value`, which must be 1 to 256 printable characters. Raises ConfigError."""
    if not (isinstance(value, str) and value.isprintable() and 1 <= len(value) <= _MAX_NAME):
        raise ConfigError(
            f"{name} is {str(value)[:_MAX_NAME]!r}; it must be 1 to {_MAX_NAME} printable characters"
        )
    return value


class EachOf(tuple[str, ...]):
    """The check that an option is a list of some of these words."""

    def __call__(self, name: str, value: object) -> None:
        given = cast("Sequence[object]", value if isinstance(value, tuple | list) else (None,))
        if any(each not in self for each in given):
            raise ConfigError(f"{name} is {value!r}; it must be a list of some of {', '.join(self)}")


def check_names(name: str, value: object) -> None:
    """Raises ConfigError unless `value` maps names of 1 to 256 printable characters to paths."""
    pairs = cast("Mapping[object, object]", value if isinstance(value, Mapping) else {None: None})
    for each, path in pairs.items():
        checked_name(f"a name in {name}", each)
        if not isinstance(path, str | Path) or not str(path):
            raise ConfigError(f"{name}: {each!r} is {path!r}; it must be a directory")


def named_object(option: str, place: str) -> Any:
    """Import the object "package.file:name", also from a file in the working directory.

    `option` is where the user names it. Raises ConfigError.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{option} is {place!r}, which cannot be imported: {error}") from error


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raises ConfigError unless `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")


class Whole(NamedTuple):
    """The check that an option is a whole number from `low` to `high`."""

    low: int
    high: int

    def __call__(self, name: str, value: object) -> None:
        check_whole(name, value, self.low, self.high)
