"""Matplotlib for pictures on disk; an extra, so only modules that draw import it."""

import importlib
from typing import Any


def matplotlib_here() -> bool:
    """Whether matplotlib is installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return False
    return True


def pyplot() -> Any:
    """matplotlib.pyplot, which needs no screen. Raises ImportError."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    return importlib.import_module("matplotlib.pyplot")
