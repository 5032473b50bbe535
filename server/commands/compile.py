"""`orca compile`: compiles a model's programs before a server needs them."""

import argparse
import os
import time

import orca_jax
from orca_jax.model_files.found_model import find_config
from orca_jax.planning.known_devices import MEMORY_FRACTION
from orca_jax.workers.environment import hold_memory
from server.commands.notes import Notes, programs_bar
from server.settings.serve_settings import compile_config


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    notes, start = Notes(), time.monotonic()
    config = compile_config(args, os.environ)
    # A mistake in it is reported before JAX is imported.
    find_config(config.model, config.load_format, config.quantization, config.kv_cache_dtype)
    hold_memory(os.environ, config.memory_fraction or MEMORY_FRACTION)
    with programs_bar(notes) as show:
        compiled = orca_jax.compile_engine(config, on_program=show)
    seconds = time.monotonic() - start
    notes(
        f"{compiled.programs} programs for {compiled.device} and {compiled.n_slots} slots in {seconds:.1f} s "
        f"({compiled.from_disk} were on disk), kept in:"
    )
    print(compiled.folder)
    return 0
