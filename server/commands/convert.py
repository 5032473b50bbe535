"""`orca convert`: a checkpoint from safetensors to Orbax or back."""

import argparse
from typing import get_args

import orca_jax
from orca_jax.config import Dtype
from server.commands.loading import bytes_bar
from server.commands.notes import Notes


def add_flags(command: argparse.ArgumentParser) -> None:
    """The two places, and the dtype."""
    command.add_argument("source", metavar="SRC", help="a checkpoint's directory, or a name on the hub")
    command.add_argument("destination", metavar="DST", help="where to write; must not exist, or be empty")
    command.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="what to convert the weights to (default: each keeps its own)",
    )


def run(args: argparse.Namespace) -> int:
    """The command, from its flags to its exit status."""
    notes = Notes()
    with bytes_bar(notes, "Converting") as show:
        to = orca_jax.convert_checkpoint(args.source, args.destination, dtype=args.dtype, on_bytes=show)
    notes(f"{args.destination}: {'an Orbax checkpoint' if to == 'orbax' else 'safetensors'}")
    return 0
