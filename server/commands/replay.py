"""`orca replay`: repeats a recording of `orca serve --record`."""

import argparse
import os
from typing import get_args

import orca_jax
from orca_jax.config import EngineConfig, LoadFormat
from orca_jax.model_files.found_model import check_model
from orca_jax.planning.known_devices import MEMORY_FRACTION
from orca_jax.service.recording import Recording, read_recording
from orca_jax.service.replay import ReplayReport
from orca_jax.simulation.simulation import simulated_replay
from orca_jax.workers.environment import hold_memory
from server.commands.notes import Notes
from server.errors import UsageError

_MOST_SHOWN = 10  # outputs that differ


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 1 if the replay differs from the recording."""
    if args.simulate and args.model is not None:
        raise UsageError("--simulate runs no model; leave MODEL out")
    recording = read_recording(args.file)
    if args.simulate:
        report = simulated_replay(recording)
    else:
        _check_model(recording, args.model)
        hold_memory(os.environ, MEMORY_FRACTION)
        report = orca_jax.replay(recording, model=args.model)
    _show(report, Notes())
    return 0 if report.same else 1


def _check_model(recording: Recording, model: str | None) -> None:
    """Raise what loading the model would raise, before JAX is imported. The replay checks the header."""
    header = recording.header
    if header.get("load_format") in get_args(LoadFormat):
        named = header.get("model") if model is None else model
        quantization = header.get("quantization")
        check_model(EngineConfig(model=named, load_format=header["load_format"], quantization=quantization))


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
