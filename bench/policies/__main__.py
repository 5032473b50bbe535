"""Compares scheduling policies by traces.

    python -m bench.policies [--real] [--trace NAME ...] [--markdown FILE] [--json FILE] [--picture FILE.svg]

Simulated (the default): llama-3.1-8b in bfloat16 on an H200, at the floors of the cost model, with the sizes
that `orca plan` gives; nothing else in it is simulated. --real: a model of GPT-2's size with random weights
on this machine's CPU, with fewer and shorter requests. Times in tables are in milliseconds: normalized
latency (end to end over output tokens), to the first token, and between two tokens of a request; "in use" is
the fraction of the slots held by a batch that have tokens, "twice" the tokens computed again after
preemptions, "cached" the fraction of prompt tokens from the prefix cache. "tok/s in bound" is the throughput
at the highest rate with a median normalized latency within the bound.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

from bench.policies.cases import real_cases, simulated_cases
from bench.policies.comparison import Machine, compare
from bench.policies.picture import picture
from bench.policies.policies import POLICIES
from bench.policies.real import RealMachine
from bench.policies.simulated import SimulatedMachine
from bench.policies.table import Row, markdown_table, text_table
from orca_jax.families.presets import PRESETS
from orca_jax.planning.known_devices import GPUS


def main() -> None:
    """Compare, print tables and, as the last line, JSON."""
    flags = _parsed()
    start = time.perf_counter()
    machine: Machine
    if flags.real:
        machine, cases = RealMachine(), real_cases(flags.share)
    else:
        machine = SimulatedMachine(PRESETS["llama-3.1-8b"], GPUS["h200"])
        cases = simulated_cases(flags.share)
    rows: list[Row] = []
    titles: dict[str, str] = {}
    for name, case in cases.items():
        if flags.trace and name not in flags.trace:
            continue
        bound = "" if case.bound is None else f"; bound {case.bound * 1e3:g} ms"
        titles[name] = f"{case.title}{bound}"
        rows += compare(name, case, machine, partial(_progress, name))
        print(text_table(titles[name], [row for row in rows if row.case == name]) + "\n", flush=True)
    tables = [markdown_table(titles[name], [row for row in rows if row.case == name]) for name in titles]
    result = {
        "bench": "policies",
        "machine": "real" if flags.real else "simulated",
        "rows": [row.record() for row in rows],
    }
    if flags.markdown is not None:
        flags.markdown.write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    if flags.json is not None:
        flags.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if flags.picture is not None:
        flags.picture.write_text(picture(rows, titles), encoding="utf-8")
    print(json.dumps({**result, "wall_seconds": round(time.perf_counter() - start, 1)}))


def _progress(name: str, label: str) -> None:
    print(f"{name}: {label}", file=sys.stderr, flush=True)


def _parsed() -> argparse.Namespace:
    names = [*simulated_cases()]
    parser = argparse.ArgumentParser(
        prog="python -m bench.policies",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        epilog=f"policies: {', '.join(POLICIES)}",
    )
    parser.add_argument("--real", action="store_true", help="on this machine's CPU (default: simulated)")
    parser.add_argument("--trace", action="append", choices=names, help="only this trace; may be repeated")
    parser.add_argument("--share", type=float, default=1.0, help="the share of the requests (default: 1)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables in markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write an SVG")
    flags = parser.parse_args()
    if not 0 < flags.share <= 1:
        parser.error(f"--share is {flags.share:g}; it must be above 0 and at most 1")
    return flags


if __name__ == "__main__":
    main()
