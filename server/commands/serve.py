"""`orca serve`: reads the settings and checks the model's files, and then loads and starts the server.

The server's modules take a second to import, and JAX more, so both are imported after these checks.
"""

import argparse
import importlib.util
import json
import os
import pkgutil
import sys
from typing import NoReturn

from orca_jax.errors import ConfigError, install_line
from orca_jax.model_files.found_model import check_model
from orca_jax.request.chat.template_files import load_chat_template
from server.commands.notes import Notes
from server.process.addresses import check_certificate
from server.settings.flags import SERVE_OPTIONS
from server.settings.serve_settings import serve_settings

SERVING = "server.commands.serving:serve_until_stopped"


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0 after a drain, even if requests had to be ended."""
    settings = serve_settings(args, os.environ)
    engine = settings.engine
    if settings.routing.replicas is not None:
        run_replicas(args)
    if settings.endpoint.chat_template is not None:
        load_chat_template(None, settings.endpoint.chat_template)
    check_certificate(settings.endpoint)
    check_model(engine, weights=engine.workers is None)  # workers elsewhere have them
    notes = Notes()
    for note in settings.notes:
        notes(note)
    return pkgutil.resolve_name(SERVING)(settings, notes)


def run_replicas(args: argparse.Namespace) -> NoReturn:
    """Hand over to a process that knows Ray, `python -m server.ray.launch` with the same flags.

    Raises ConfigError if Ray is missing.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"--replicas needs Ray, which is not installed: {install_line('ray')}")
    names = ["config", *(option.name for option in SERVE_OPTIONS)]
    flags = {name: getattr(args, name) for name in names if hasattr(args, name)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "server.ray.launch", json.dumps(flags, default=str)])
