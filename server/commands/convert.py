"""`orca convert`: converts a checkpoint between safetensors, Orbax and what trainers save."""

import argparse
from typing import get_args

import orca_jax
from orca_jax.config import Dtype
from orca_jax.families.trainers.layouts import FORMATS
from server.commands.loading import bytes_bar
from server.commands.notes import Notes


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add SRC, DST, --to and --dtype."""
    command.add_argument("source", metavar="SRC", help="a directory, or a name on the Hugging Face hub")
    command.add_argument("destination", metavar="DST", help="a directory that does not exist or is empty")
    command.add_argument(
        "--to",
        choices=FORMATS,
        help="format of the converted weights (default: Orbax from safetensors, safetensors from all others)",
    )
    command.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="data type of the converted weights (default: unchanged)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    notes = Notes()
    with bytes_bar(notes, "Converting") as show:
        to = orca_jax.convert_checkpoint(
            args.source, args.destination, to=args.to, dtype=args.dtype, on_bytes=show
        )
    made = {"safetensors": "safetensors", "orbax": "an Orbax checkpoint"}.get(
        to, f"an Orbax checkpoint, {to}"
    )
    notes(f"{args.destination}: {made}")
    return 0
