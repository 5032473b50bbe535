"""Imports what a user names: a policy, or a function that makes a model."""

import os
import pkgutil
import sys
from typing import Any

from orca_jax.errors import ConfigError


def named_object(option: str, place: str) -> Any:
    """The object "package.file:name", also of a file in the working directory; `option` is where it is named.

    Raises ConfigError.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{option} is {place!r}, which cannot be imported: {error}") from error
