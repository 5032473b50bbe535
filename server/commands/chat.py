"""`orca chat`: checks the flags and the model's files, and then loads the model and talks with it.

The chat itself takes a second to import, and JAX more, so both are imported after these checks.
"""

import argparse
import pkgutil
from pathlib import Path

from orca_jax.config import EngineConfig
from orca_jax.errors import NotSupported
from orca_jax.model_files.found_model import DEMO_MODEL, check_model
from orca_jax.request.chat.template_files import load_chat_template
from server.settings.flags import engine_config
from server.settings.sampling_flags import chat_params

TALKING = "server.commands.talking:load_and_talk"
_NO_TEMPLATE = "give one with --chat-template FILE, or continue text with `orca generate`"


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    chat_params(args)
    engine = engine_config("chat", args)
    check_model(engine)
    _check_template(engine, args.chat_template)
    return pkgutil.resolve_name(TALKING)(args, engine, no_template=_NO_TEMPLATE)


def _check_template(engine: EngineConfig, file: Path | None) -> None:
    """Raise for a mistake in the template, or if a model on this machine has none."""
    if file is not None:
        load_chat_template(None, file)
        return
    place = engine.tokenizer or engine.model or DEMO_MODEL
    directory = Path(str(place)).expanduser()
    if directory.is_dir() and load_chat_template(directory, None) is None:
        raise NotSupported(f"{place} has no chat template; {_NO_TEMPLATE}", param="messages")
