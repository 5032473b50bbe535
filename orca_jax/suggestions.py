"""Suggests the known name that a misspelt one probably stands for."""

import difflib
from collections.abc import Iterable

LIKELY = 0.75  # a share of common letters at which one name is probably the other, misspelled


def closest(name: str, known: Iterable[str], *, at_least: float = 0.6) -> str | None:
    """The known name closest to `name`, whatever its case; None if none shares that much with it."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=at_least)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The end of an error message: the known name closest to `name`, compared without their `prefix`."""
    found = closest(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known])
    return f"; did you mean {prefix}{found}?" if found else ""
