"""Imports a function by its name, so that a program loads what it has been asked for and no more."""

import pkgutil
from collections.abc import Callable
from typing import Any


def function_named(name: str) -> Callable[..., Any]:
    """The function "package.module:function"; its module is imported now, if it is not yet."""
    return pkgutil.resolve_name(name)
