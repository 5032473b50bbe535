"""`orca compile`: the programs of a model, compiled before a server needs them."""

import argparse
import os
import time

import orca_jax
from orca_jax.errors import ConfigError
from orca_jax.planning.known_devices import MEMORY_FRACTION
from orca_jax.workers.environment import hold_memory
from server.commands.compile_bar import programs_bar
from server.commands.notes import Notes
from server.settings.settings import engine_settings


def run(args: argparse.Namespace) -> int:
    """The command, from its flags to its exit status."""
    notes, start = Notes(), time.monotonic()
    model, engine, pipeline = engine_settings(args, os.environ)
    if engine.compile_cache is None:
        raise ConfigError("compile_cache is none, so nothing would be kept; name a folder, or leave it out")
    hold_memory(os.environ, engine.memory_fraction or MEMORY_FRACTION)
    with programs_bar(notes) as show:
        made = orca_jax.compile_model(
            model,
            max_batch_size=engine.max_batch_size,
            n_slots=engine.n_slots,
            max_batch_tokens=engine.max_batch_tokens,
            deterministic=engine.deterministic,
            memory_fraction=engine.memory_fraction,
            dtype=engine.dtype,
            attention=engine.attention,
            command_buffer_collectives=engine.command_buffer_collectives,
            tensor_parallel=engine.tensor_parallel,
            pipeline_parallel=engine.pipeline_parallel,
            worker_processes=pipeline.worker_processes,
            compile_cache=engine.compile_cache,
            on_program=show,
        )
    seconds = time.monotonic() - start
    notes(
        f"{made.programs} programs for {made.device} and {made.n_slots} slots in {seconds:.1f} s "
        f"({made.from_disk} were on disk), kept in:"
    )
    print(made.folder)
    return 0
