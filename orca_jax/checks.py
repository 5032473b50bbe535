"""Checks of configuration values: each raises a ConfigError that says what is allowed."""

import math

from orca_jax.errors import ConfigError


def check_seconds(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a number of seconds above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a number of seconds above 0")


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raises ConfigError unless `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")


def check_fraction(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a number above 0, and at most 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0, and at most 1")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def check_flag(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be True or False")
