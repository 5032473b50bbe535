"""What somebody probably meant who wrote a name that is not known."""

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, without regard to case; None if none is close."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The end of an error message: the known name closest to `name`, compared without their `prefix`."""
    found = closest(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known])
    return f"; did you mean {prefix}{found}?" if found else ""
