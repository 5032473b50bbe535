"""Measures the split-attention kernel on a GPU: correctness, speed, and speed relative to its peers.

    python -m bench.kernel --json kernel.json --picture kernel.png

Needs a checkout, a Hopper GPU (H100, H200), an NVIDIA driver and `jax[cuda13]`; uses PyTorch and matplotlib
if they are installed. It ends within 8 minutes. Without a GPU, but with the CUDA plugin installed,

    JAX_PLATFORMS=cpu python -m bench.kernel --compile-only

compiles all of its programs for an H200.

It prints each line as it is measured, in this order: the device's two ceilings (the bandwidth of a copy and
the operations per second of a matrix product); the kernel against float64 for every head size, dtype and
block size, on fresh random batches; decode batches ("increments"), prompts ("initiation"), mixed batches; the
kernels that one call launches; cuDNN, JAX's own decode_attention and paged_attention, one launch per request,
and the engine's path without the kernel; PyTorch's scaled_dot_product_attention. A failure or a missing peer
is a line with the reason. The exit status is 1 if a form of the kernel is wrong or could not run. `--only`
names sections, each of which can run by itself.

The columns: median microseconds of a call, half the range of the repeats in %, the host's microseconds to
issue a call (if they are close to the call's time, they are what was measured), achieved GB/s and TFLOP/s and
their shares of the ceilings, the floor, time over floor, and a sample's relative error against float64.
`bench/kernel/clock.py` describes the timing. The aims, hit or missed, and one line of JSON come last;
`--json` writes all figures to a file.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kernel.aims import CORRECT, Aim, check_aims
from bench.kernel.child import Words, work_through
from bench.kernel.compile import compile_all
from bench.kernel.picture import draw
from bench.kernel.results import HEAD, Result, figures, line
from bench.kernel.run import all_tasks
from bench.kernel.shapes import SECTIONS, Scale, Task, torch_cases
from bench.paper.pyplot import matplotlib_here
from orca_jax.planning.cost_model import Device

NEEDS = (
    "bench.kernel needs a Hopper GPU (compute capability 9.0), for which the kernel is written; "
    "--compile-only needs none"
)
_TORCH_SECONDS = 60.0
_ROOT = Path(__file__).parents[2]


class Run:
    """One run: its progress and results."""

    def __init__(self, *, only: list[str], scale: Scale, seed: int) -> None:
        self.tasks = all_tasks(only, scale)
        cases = torch_cases(scale) if "torch" in only else ()
        self.torch_tasks = [Task("torch", f"torch: torch, {case.name}", "torch", case) for case in cases]
        self.results: list[Result] = []
        self.versions: dict[str, Any] = {"seed": seed}
        self.device: Device | None = None
        self.fit, self._tiny = True, scale == "tiny"
        self._flags = ["--scale", scale]
        self._only, self._seed = only, seed
        self._section = ""

    def work(self, seconds: float) -> None:
        """Run all tasks, starting none after `seconds`."""
        end = time.time() + seconds
        if self.tasks:
            until = end - (_TORCH_SECONDS if self.torch_tasks else 0)
            flags = ["--only", ",".join(self._only), "--seed", str(self._seed), "--until", f"{until:.0f}"]
            work_through(
                "bench.kernel.run",
                [*flags, *self._flags],
                len(self.tasks),
                lambda w: self._heard(w, self.tasks),
            )
        if self.torch_tasks and self.fit:
            flags = ["--until", f"{max(end, time.time() + _TORCH_SECONDS / 2):.0f}"]
            work_through(
                "bench.kernel.torch_attention",
                [*flags, *self._flags],
                len(self.torch_tasks),
                lambda w: self._heard(w, self.torch_tasks),
            )

    def _heard(self, words: Words, tasks: list[Task]) -> None:
        if "index" in words:
            self._add(Result(tasks[words["index"]], words.get("values", {}), words.get("failed")))
        elif "compiled" in words:
            print(
                f"  {words['section']}: compiled {words['compiled']} of {words['of']}",
                file=sys.stderr,
                flush=True,
            )
        elif "unfit" in words:
            print(f"\ntorch: nothing: {words['unfit']}", flush=True)
        elif "capability" in words or "torch" in words:
            self.fit = self._tiny or words.get("capability", "9.0") == "9.0"
            self.versions |= words

    def _add(self, result: Result) -> None:
        self.results.append(result)
        section = result.task.section
        if section != self._section:
            self._section = section
            print(f"\n{section}", flush=True)
            if section in ("increments", "sizes", "initiation", "mixed", "peers", "torch"):
                print(HEAD)
        if section == "ceilings" and result.failed is None:
            self.device = Device(result.values["bandwidth"], result.values["matrix_rate"])
            print(
                f"copy {self.device.bandwidth / 1e9:.0f} GB/s, "
                f"sum {result.values['read_bandwidth'] / 1e9:.0f} GB/s, "
                f"matrix product {self.device.matrix_rate / 1e12:.0f} TFLOP/s",
                flush=True,
            )
        else:
            print(line(result, self.device), flush=True)

    def record(self, aims: list[Aim]) -> dict[str, Any]:
        """All figures, for a file."""
        return {
            "benchmark": "kernel",
            **self.versions,
            "device_ceilings": None if self.device is None else asdict(self.device),
            "aims": [asdict(aim) for aim in aims],
            "results": [
                {
                    "section": r.task.section,
                    "name": r.task.name,
                    "subject": r.task.subject,
                    "failed": r.failed,
                    **r.values,
                    **(figures(r, self.device) if r.seconds is not None and self.device is not None else {}),
                }
                for r in self.results
            ],
        }


def aims_table(aims: list[Aim]) -> Table:
    """A table of the aims, hit or missed."""
    table = Table(title="aims")
    for column in ("aim", "", "cases", "case furthest from it"):
        table.add_column(column)
    for aim in aims:
        word = "not measured" if aim.hit is None else "hit" if aim.hit else "MISSED"
        table.add_row(aim.name, word, f"{aim.n_hit} of {aim.n_cases}", aim.worst)
    return table


def main() -> None:
    """Run, print results and a final line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", default=",".join(SECTIONS), help=f"sections: {','.join(SECTIONS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="a few cases of each section")
    parser.add_argument(
        "--tiny", action="store_true", help="one case of each section, interpreted; needs no GPU"
    )
    parser.add_argument("--seed", type=int, help="seed of the random inputs (default: random)")
    parser.add_argument(
        "--seconds", type=float, default=440, help="start no task after this time (default: 440)"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--picture", type=Path, help="plot the shares of the ceilings into this file")
    parser.add_argument(
        "--compile-only", action="store_true", help="compile all programs for an H200; needs no GPU"
    )
    flags = parser.parse_args()
    only = flags.only.split(",")
    if unknown := sorted(set(only) - set(SECTIONS)):
        parser.error(f"--only has {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}")
    scale: Scale = "tiny" if flags.tiny else "quick" if flags.quick else "all"
    if flags.compile_only:
        sys.exit(1 if compile_all(only, scale) else 0)
    if flags.picture and not matplotlib_here():
        print("--picture needs matplotlib, so there is none (pip install matplotlib)", flush=True)
    if "ceilings" not in only and set(only) - {"correctness"}:
        only.insert(0, "ceilings")  # the other sections are judged by them
    seed = flags.seed if flags.seed is not None else int(time.time()) % 1_000_000
    print(f"seed {seed}", flush=True)
    run = Run(only=only, scale=scale, seed=seed)
    run.work(flags.seconds)
    if not run.fit:
        sys.exit(f"{NEEDS}; this is {run.versions['device']}")
    aims = check_aims(run.results, run.device)
    Console(width=110).print(aims_table(aims))
    record = run.record(aims)
    if flags.json:
        flags.json.write_text(json.dumps(record, indent=1) + "\n")
    if flags.picture and run.device is not None and matplotlib_here():
        draw(run.results, run.device, flags.picture, f"split attention on {run.versions.get('device')}")
    print(json.dumps({name: value for name, value in record.items() if name != "results"}))
    if "correctness" in only and not all(aim.hit for aim in aims if aim.name in CORRECT):
        sys.exit(1)


if __name__ == "__main__":
    main()
