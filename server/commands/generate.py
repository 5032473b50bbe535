"""`orca generate`: checks the flags and the model's files, and then loads the model and generates.

The generating code takes a second to import, and JAX more, so both are imported after these checks.
"""

import argparse
import pkgutil

from orca_jax.model_files.found_model import check_model
from orca_jax.request.chat.template_files import load_chat_template
from server.errors import UsageError
from server.settings.flags import engine_config
from server.settings.sampling_flags import sampling_params

GENERATING = "server.commands.generating:generate"
_NO_TEMPLATE = "give one with --chat-template FILE, or prompts instead of messages"


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    sampling_params(args)
    engine = engine_config("generate", args)
    check_model(engine)
    if args.input is None and args.output is not None:
        raise UsageError("--output needs --input; the text of a PROMPT goes to stdout")
    if args.input is not None and args.prompt:
        raise UsageError("give either PROMPTs or --input, not both")
    for flag, value in (("--overwrite", args.overwrite), ("--retry-errors", args.retry_errors)):
        if value and args.output in (None, "-"):
            raise UsageError(f"{flag} is about the file of --output; give one, or leave it out")
    if args.overwrite and args.retry_errors:
        raise UsageError("--overwrite runs every line; leave --retry-errors out")
    if args.chat_template is not None:
        load_chat_template(None, args.chat_template)
    return pkgutil.resolve_name(GENERATING)(args, engine, no_template=_NO_TEMPLATE)
