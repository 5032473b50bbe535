"""`orca diff`: says in which layer a trainer's forward pass and the engine's differ first."""

import argparse
import os

import orca_jax
from orca_jax.checks import check_place, check_whole
from orca_jax.config import EngineConfig
from orca_jax.model_files.found_model import check_model
from orca_jax.planning.known_devices import MEMORY_FRACTION
from orca_jax.workers.environment import hold_memory


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 1 if a layer differs by more than the tolerance."""
    check_place("--against", args.against)
    check_whole("--length", args.length, 2, 1 << 20)
    check_model(EngineConfig(model=args.model, dtype=args.dtype, generation_config="none"))
    hold_memory(os.environ, MEMORY_FRACTION)
    report = orca_jax.layer_gaps(
        args.model,
        args.against,
        prompt=args.prompt,
        length=args.length,
        dtype=args.dtype,
        clip=args.clip,
        tolerance=args.tolerance,
    )
    print(report)
    return 0 if report.first is None else 1
