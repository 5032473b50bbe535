"""Compiles every program of the kernel benchmark for an H200, without needing one, and times that.

A program that compiles here can still fail at run time, but not for a wrong shape, a missing name or too
little shared memory.
"""

import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.kernel.run import Compiled, all_tasks
from bench.kernel.shapes import Scale
from orca_jax.aot.described_gpu import on_h200

_N_CORES = 132


def compile_all(only: Sequence[str], scale: Scale) -> int:
    """Compile, print a table and a line of JSON; returns the number of programs that did not compile."""
    here = on_h200()
    table = Table(title=f"programs of bench.kernel for an H200, jax {jax.__version__}")
    for column in ("section", "subject", "programs", "seconds in total", "slowest", "do not compile"):
        table.add_column(column, justify="left" if column in ("section", "subject") else "right")
    found, reasons = [], Counter[str]()
    start = time.perf_counter()
    tasks = [task for task in all_tasks(only, scale) if task.section != "ceilings"]
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("compiling", total=None)
        for (section, subject), group in itertools.groupby(tasks, key=lambda t: (t.section, t.subject)):
            compiled = Compiled(list(group), scale, n_cores=_N_CORES, sharding=here)
            for i, _ in enumerate(compiled.compile()):
                progress.update(bar, description=f"{section}, {subject}: {i + 1} of {len(compiled)}")
            failed = 0
            for key in compiled.seconds:
                try:
                    compiled.of(key)
                except Exception as error:
                    failed += 1
                    which = key if isinstance(key, str) else subject
                    message = " ".join(str(error).split())[:300]
                    reasons[f"{section}, {which}: {type(error).__name__}: {message}"] += 1
            unmade = [error for error in compiled.programs.values() if isinstance(error, Exception)]
            reasons.update(f"{section}, {subject}: {error}" for error in unmade)
            seconds = list(compiled.seconds.values()) or [0.0]
            row = (
                section,
                subject or "kernel",
                len(compiled),
                sum(seconds),
                max(seconds),
                failed + len(unmade),
            )
            found.append(row)
            table.add_row(*(f"{x:.1f}" if isinstance(x, float) else str(x) for x in row))
    console = Console(width=110)
    console.print(table)
    for reason, times in reasons.items():
        console.print(f"{times} x {reason}", markup=False, highlight=False)
    took = time.perf_counter() - start
    print(
        json.dumps(
            {"benchmark": "kernel --compile-only", "jax": jax.__version__, "seconds": took, "sections": found}
        )
    )
    return sum(reasons.values())
