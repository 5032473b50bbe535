"""`orca replay`: repeats a recording of `orca serve --record`."""

import argparse
import os
from pathlib import Path

import orca_jax
from orca_jax.planning.known_devices import MEMORY_FRACTION
from orca_jax.service.recording import read_recording
from orca_jax.service.replay import ReplayReport
from orca_jax.simulation.replay import simulated_replay
from orca_jax.workers.environment import hold_memory
from server.commands.notes import Notes
from server.errors import UsageError

_MOST_SHOWN = 10  # outputs that differ


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add FILE, --model and --simulate."""
    command.add_argument("file", metavar="FILE", type=Path, help="a file that `orca serve --record` wrote")
    command.add_argument(
        "--model", metavar="MODEL", help="where the recorded model is on this machine (default: as recorded)"
    )
    command.add_argument(
        "--simulate",
        action="store_true",
        help="repeat the schedule alone, on a simulated engine: needs neither model nor device",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 1 if the replay differs from the recording."""
    if args.simulate:
        if args.model is not None:
            raise UsageError("--simulate runs no model; leave --model out")
        report = simulated_replay(read_recording(args.file))
    else:
        hold_memory(os.environ, MEMORY_FRACTION)
        report = orca_jax.replay(args.file, model=args.model)
    _show(report, Notes())
    return 0 if report.same else 1


def _show(report: ReplayReport, notes: Notes) -> None:
    print(f"{report.n_requests} requests, {report.n_iterations} iterations, {report.n_tokens} output tokens")
    if report.difference:
        print(f"not the same batches: {report.difference}")
    else:
        print("the same batches in every iteration")
    if report.n_outputs:
        n_same = report.n_outputs - len(report.other_outputs)
        print(f"{n_same} of {report.n_outputs} outputs are the same")
    for name, index in report.other_outputs[:_MOST_SHOWN]:
        print(f"request {name} differs from its token {index} on")
    if report.why_last:
        notes(f"the replay ends before the recorded service did: {report.why_last}")
