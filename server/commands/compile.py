"""`orca compile`: the programs of a model, compiled before a server needs them."""

import argparse
import os
import time

import orca_jax
from orca_jax.planning.known_devices import MEMORY_FRACTION
from orca_jax.workers.environment import hold_memory
from server.commands.compile_bar import programs_bar
from server.commands.notes import Notes
from server.settings.engine import config_to_compile
from server.settings.settings import engine_settings


def run(args: argparse.Namespace) -> int:
    """The command, from its flags to its exit status."""
    notes, start = Notes(), time.monotonic()
    config = config_to_compile(*engine_settings(args, os.environ))
    hold_memory(os.environ, config.sizes.memory_fraction or MEMORY_FRACTION)
    with programs_bar(notes) as show:
        made = orca_jax.compile_engine(config, on_program=show)
    seconds = time.monotonic() - start
    notes(
        f"{made.programs} programs for {made.device} and {made.n_slots} slots in {seconds:.1f} s "
        f"({made.from_disk} were on disk), kept in:"
    )
    print(made.folder)
    return 0
