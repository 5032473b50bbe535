"""`orca serve --replicas N`: hands over to a process that knows Ray, which `orca serve` never imports."""

import argparse
import importlib.util
import json
import os
import sys
from typing import NoReturn

from orca_jax.errors import ConfigError
from orca_jax.extras import install_line
from server.settings.flags import SERVE_OPTIONS


def run(args: argparse.Namespace) -> NoReturn:
    """Become `python -m server.ray.launch` with the same flags. Raises ConfigError if Ray is missing."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"--replicas needs Ray, which is not installed: {install_line('ray')}")
    names = ["config", *(option.name for option in SERVE_OPTIONS)]
    flags = {name: getattr(args, name) for name in names if hasattr(args, name)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "server.ray.launch", json.dumps(flags, default=str)])
