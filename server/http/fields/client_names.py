"""Fields of `SamplingParams` and of prompts under the names that a client has for them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from orca_jax.errors import InvalidRequest

# Where a message names fields: "top_k is 7; ...", "seed and n are both given; ...". The rest may be quoted.
_NAMED = re.compile(r"\A(\w+)(?:( and )(\w+)(?= are both given))?")


@contextmanager
def named(**names: str) -> Iterator[None]:
    """Give an InvalidRequest the client's names of fields: `named(prompt="messages")`."""

    def renamed(match: re.Match[str]) -> str:
        return "".join(names.get(part, part) for part in match.groups("") if part)

    try:
        yield
    except InvalidRequest as error:
        param, message = names.get(error.param, error.param), _NAMED.sub(renamed, str(error))
        if (param, message) == (error.param, str(error)):
            raise
        raise type(error)(message, param=param) from error
