"""Renames fields in errors from the engine's names to those of the client's API."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from orca_jax.errors import InvalidRequest

# Where a message names fields: "top_k is 7; ...", "seed and n are both given; ...". The rest may quote the
# client.
_NAMED = re.compile(r"\A(\w+)(?:( and )(\w+)(?= are both given))?")


@contextmanager
def renamed_fields(**names: str) -> Iterator[None]:
    """Rename fields in any InvalidRequest raised inside: `renamed_fields(prompt="messages")`."""

    def renamed(match: re.Match[str]) -> str:
        return "".join(names.get(part, part) for part in match.groups("") if part)

    try:
        yield
    except InvalidRequest as error:
        param, message = names.get(error.param, error.param), _NAMED.sub(renamed, str(error))
        if (param, message) == (error.param, str(error)):
            raise
        raise type(error)(message, param=param) from error
