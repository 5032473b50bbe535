"""`orca convert`: converts a checkpoint between safetensors, Orbax and what trainers save."""

import argparse
from pathlib import Path

import orca_jax
from orca_jax.config import EngineConfig
from orca_jax.model_files.found_model import check_model
from orca_jax.model_files.locate import check_is_free
from server.commands.notes import Notes, bytes_bar


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    check_model(EngineConfig(model=args.source, generation_config="none"))
    check_is_free(Path(args.destination).expanduser())
    notes = Notes()
    with bytes_bar(notes, "Converting") as show:
        to = orca_jax.convert_checkpoint(
            args.source,
            args.destination,
            to=args.to,
            dtype=args.dtype,
            quantization=args.quantization,
            on_bytes=show,
        )
    made = {"safetensors": "safetensors", "orbax": "an Orbax checkpoint"}.get(
        to, f"an Orbax checkpoint, {to}"
    )
    notes(f"{args.destination}: {made}")
    return 0
