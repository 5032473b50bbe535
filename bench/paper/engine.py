"""Figure 9 of the paper: the time of a batch of equal requests on the engine, without its scheduler.

    python -m bench.paper.engine [--preset gpt2] \
        [--inputs 32,128] [--output 32] [--batches 1,2,4,8,16,32] [--paper]

orca(n): this script injects the same batch, of requests with n input tokens, until all of them have their
output, issuing each iteration while the previous one runs; nothing is scheduled. Each request has slots for
the tokens it will have. ft(n): the baseline (bench/paper/request_level.py) on the same engine, with slots for
the model's maximum length for each request; a batch whose slots do not fit has no entry. Every batch runs
once before it is measured, then the two in turn.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import jax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.paper.play import play, traced_request
from bench.paper.pyplot import matplotlib_here
from bench.paper.serving_picture import draw_engine
from bench.paper.shared_engine import SharedEngine, add_engine_flags, compiling
from orca_jax.errors import ConfigError, install_line
from orca_jax.families.presets import PRESETS
from orca_jax.request.request import Request, begin_iteration
from orca_jax.scheduling.blocks import round_up
from orca_jax.scheduling.engine_protocol import Iteration, never
from server.load.trace import Trace, homogeneous_trace

SYSTEMS = ("orca", "ft")
DEADLINE = 600.0  # seconds for one batch


@dataclass(frozen=True, slots=True)
class Entry:
    """One batch on one system: the seconds of each run, or no runs if its slots do not fit."""

    system: str
    n_input: int
    batch: int
    seconds: list[float]

    @property
    def label(self) -> str:
        """The label of the paper's line."""
        return f"{self.system}({self.n_input})"


def inject(shared: SharedEngine, trace: Trace) -> float:
    """Seconds from the first injection of a batch to its last token; the engine alone."""
    kv, engine = shared.kv, shared.engine
    batch: list[Request] = []
    for i, one in enumerate(trace):
        request = traced_request(i, one)
        request.row = kv.reserve(request.max_tokens)
        batch.append(request)
    n_left = trace[0].n_output  # iterations to issue
    in_flight = deque[Iteration]()
    start = time.perf_counter()
    while n_left or in_flight:
        if n_left and len(in_flight) < 2:
            rows = [(request, request.n_to_compute) for request in batch]
            in_flight.append(engine.issue(rows))
            n_left -= 1
            begin_iteration(rows)
            continue
        returned = engine.wait(in_flight.popleft(), never)
        assert returned is not None
        for request, token_id in zip(batch, returned.token_ids, strict=True):
            request.n_in_flight -= 1
            request.output_ids.append(int(token_id))
    seconds = time.perf_counter() - start
    for request, one in zip(batch, trace, strict=True):
        assert len(request.output_ids) == one.n_output
        kv.release(request.row)
    return seconds


def by_request(shared: SharedEngine, trace: Trace) -> float:
    """Seconds of the same batch on the baseline."""
    n = len(trace)
    records = play(trace, shared.baseline(n, n), deadline=DEADLINE, check=shared.check)
    assert {one.batch for one in records.rows} == {0}, "all of them in one batch"
    return max(one.finished or 0.0 for one in records.requests) - records.iterations[0].issued


def fits(shared: SharedEngine, system: str, trace: Trace) -> bool:
    """Whether the slots of all requests fit at once."""
    one, block_size = trace[0], shared.serving.block_size
    each = len(one.prompt_ids) + one.n_output if system == "orca" else shared.model.n_positions
    return len(trace) * round_up(each, block_size) <= shared.serving.n_blocks * block_size


def measure(shared: SharedEngine, traces: Sequence[Trace], repeat: int, progress: Progress) -> list[Entry]:
    """Time both systems alternately, each batch `repeat` times after one warm-up run."""
    run = {"orca": inject, "ft": by_request}
    entries: list[Entry] = []
    task = progress.add_task("batches", total=len(traces) * (repeat + 1))
    for trace in traces:
        found = [Entry(name, len(trace[0].prompt_ids), len(trace), []) for name in SYSTEMS]
        for i in range(repeat + 1):
            for entry in found:
                if fits(shared, entry.system, trace):
                    seconds = run[entry.system](shared, trace)
                    entry.seconds.extend([seconds] * (i > 0))
            progress.advance(task)
        for entry in found:
            if entry.seconds:
                print(f"{entry.label}, batch {entry.batch}: {median(entry.seconds):.3f} s", flush=True)
        entries += found
    return entries


def table(entries: Sequence[Entry]) -> Table:
    """Medians in seconds, least and most, and ORCA over the baseline."""
    made = Table(title="seconds of a batch: median (least to most)")
    made.add_column("batch", justify="right")
    inputs = sorted({entry.n_input for entry in entries})
    by_key = {(entry.system, entry.n_input, entry.batch): entry.seconds for entry in entries}
    for n_input in inputs:
        for name in SYSTEMS:
            made.add_column(f"{name}({n_input})", justify="right")
        made.add_column("ft / orca", justify="right")
    for batch in sorted({entry.batch for entry in entries}):
        cells: list[str] = []
        for n_input in inputs:
            pair = [by_key[name, n_input, batch] for name in SYSTEMS]
            cells += [
                f"{median(one):.3f} ({min(one):.3f} to {max(one):.3f})" if one else "no room" for one in pair
            ]
            cells.append(f"{median(pair[1]) / median(pair[0]):.2f}" if all(pair) else "")
        made.add_row(str(batch), *cells)
    return made


def main() -> None:
    """Measure, print a table and last one line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper.engine",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add_engine_flags(parser, preset="gpt2")
    parser.add_argument("--inputs", default="32,128", help="input tokens (default: 32,128)")
    parser.add_argument("--output", type=int, default=32, help="generated tokens (default: 32)")
    parser.add_argument("--batches", default="1,2,4,8,16,32", help="requests (default: 1,2,4,8,16,32)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each that count (default: 3)")
    parser.add_argument("--paper", action="store_true", help="the paper's model: gpt3-13b")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds of every run")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw Figure 9")
    flags = parser.parse_args()
    if flags.picture and not matplotlib_here():
        parser.error(f"--picture needs matplotlib: {install_line('bench')}")
    preset = flags.preset or ("gpt3-13b" if flags.paper else "gpt2")
    inputs = [int(n) for n in flags.inputs.split(",")]
    batches = [int(n) for n in flags.batches.split(",")]
    longest = max(inputs) + flags.output
    if min([*inputs, *batches, flags.output, flags.repeat]) < 1:
        parser.error("--inputs, --output, --batches and --repeat count from 1")
    if longest > PRESETS[preset].n_positions:
        parser.error(f"{preset} has {PRESETS[preset].n_positions} positions; {longest} tokens do not fit")
    traces = [
        homogeneous_trace(
            batch, n_input=n, n_output=flags.output, vocab_size=PRESETS[preset].vocab_size, seed=flags.seed
        )
        for n in inputs
        for batch in batches
    ]
    buckets = tuple(sorted({n * batch for n in (1, *inputs) for batch in batches}))
    with Progress(console=Console(stderr=True)) as progress:
        try:
            shared = SharedEngine(
                preset,
                dtype=flags.dtype,
                most_bs=max(batches),
                most_tokens=buckets[-1],
                buckets=buckets,
                n_slots=flags.n_slots,
                pipeline_parallel=flags.pipeline_parallel,
                seed=flags.seed,
                on_program=compiling(progress),
            )
        except ConfigError as error:
            parser.error(str(error))
        entries = measure(shared, traces, flags.repeat, progress)
    facts = {"bench": "engine", "preset": preset, **shared.facts(), "n_output": flags.output}
    print(
        f"Figure 9 with {preset}, {shared.dtype}, on {shared.device}, jax {jax.__version__}: "
        f"{flags.output} tokens generated, {shared.serving.n_slots} slots"
    )
    Console(width=140).print(table(entries))
    records = [
        {"label": one.label, "n_input": one.n_input, "batch": one.batch, "seconds": one.seconds}
        for one in entries
    ]
    if flags.json:
        flags.json.write_text(json.dumps(facts | {"entries": records}) + "\n", encoding="utf-8")
    if flags.picture:
        medians = {
            label: {one.batch: median(one.seconds) for one in entries if one.label == label and one.seconds}
            for label in dict.fromkeys(one.label for one in entries)
        }
        title = f"{preset}, {shared.dtype}, {shared.device}: {flags.output} tokens generated"
        draw_engine(medians, flags.picture, title)
    for one in records:
        one["seconds"] = round(median(one["seconds"]), 4) if one["seconds"] else None
    print(json.dumps(facts | {"entries": records}))


if __name__ == "__main__":
    main()
