"""`orca worker`: runs one pipeline stage in this process, for an `orca serve --workers` elsewhere."""

import argparse
import os
from functools import partial

import orca_jax
from orca_jax.control.handshake import control_address
from orca_jax.model_files.found_model import check_model
from orca_jax.planning.known_devices import MEMORY_FRACTION
from orca_jax.workers.environment import hold_memory
from orca_jax.workers.worker_options import WorkerOptions, check_stages
from server.commands.notes import Notes, bytes_bar
from server.settings.api_keys import read_secret
from server.settings.flags import WorkerFlags, engine_config, read_flags


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0 after SIGTERM or Ctrl-C, 1 if the device hangs."""
    notes = Notes()
    secret = read_secret(args.control_secret_file, os.environ)
    options = worker_options(args, secret)
    check_model(options.engine)
    hold_memory(os.environ, options.engine.memory_fraction or MEMORY_FRACTION)
    loading = partial(bytes_bar, notes, "Loading the stage")
    status = orca_jax.run_worker(options, note=notes, loading=loading)
    if status:
        os._exit(status)  # a normal exit would wait forever for a hung device
    return status


def worker_options(args: argparse.Namespace, secret: str) -> WorkerOptions:
    """The worker's options from its flags. Raises ConfigError."""
    flags = read_flags(args, WorkerFlags)
    address = control_address(flags.listen)
    check_stages(flags.of)
    return WorkerOptions(
        stage=flags.stage - 1,
        engine=engine_config(
            "worker", args, pipeline_parallel=flags.of, compile_ahead=True, control_secret=secret
        ),
        listen=flags.listen,
        data_host=(address.host or "127.0.0.1") if flags.data_host is None else flags.data_host,
        link=flags.link,
        coordinator=flags.coordinator,
    )
