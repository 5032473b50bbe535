"""`orca convert`: converts a checkpoint between safetensors, Orbax and what trainers save.

With --suggest it writes a map of an Orbax checkpoint's names instead, for --map.
"""

import argparse
from pathlib import Path

import orca_jax
from orca_jax.config import EngineConfig
from orca_jax.model_files.found_model import check_model
from orca_jax.model_files.locate import check_is_free
from server.commands.notes import Notes, bytes_bar


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    notes = Notes()
    if args.suggest:
        return _suggest(args, notes)
    if args.map is None:
        check_model(EngineConfig(model=args.source, generation_config="none"))
    check_is_free(Path(args.destination).expanduser())
    with bytes_bar(notes, "Converting") as show:
        to = orca_jax.convert_checkpoint(
            args.source,
            args.destination,
            to=args.to,
            dtype=args.dtype,
            quantization=args.quantization,
            names_file=args.map,
            on_bytes=show,
        )
    made = {"safetensors": "safetensors", "orbax": "an Orbax checkpoint"}.get(to, f"a checkpoint of {to}")
    notes(f"{args.destination}: {made}")
    return 0


def _suggest(args: argparse.Namespace, notes: Notes) -> int:
    """Write a map; returns 1 if the user has something to decide in it."""
    path = Path(args.destination).expanduser()
    suggested = orca_jax.suggest_names(args.source)
    suggested.write(path)
    for note in suggested.notes:
        notes(note)
    for entry, what in suggested.unsure.items():
        notes(f"unsure: {entry}: {what}")
    if suggested.unsure:
        notes(f'{path}: decide about {len(suggested.unsure)} entries, and take each out of "unsure"')
        return 1
    notes(f"{path}: each weight has its array; read it, and convert with --map {path}")
    return 0
