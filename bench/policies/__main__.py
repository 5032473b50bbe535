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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from bench.policies.cases import Case, real_cases, simulated_cases
from bench.policies.figures import Figures
from bench.policies.limits import Limits
from bench.policies.picture import picture
from bench.policies.policies import BASELINE, POLICIES
from bench.policies.real import RealMachine
from bench.policies.search import highest_rate
from bench.policies.simulated import SimulatedMachine
from bench.policies.table import Row, markdown_table, text_table
from bench.policies.traces import Trace
from orca_jax.families.presets import PRESETS
from orca_jax.planning.known_devices import GPUS


class Machine(Protocol):
    """What plays traces."""

    def play(self, policy: str, limits: Limits, trace: Trace) -> Figures:
        """Play the trace on a new engine."""
        ...


def compare(
    name: str, case: Case, machine: Machine, on_row: Callable[[str], object] = lambda label: None
) -> list[Row]:
    """A row for each policy and each reference of the case."""
    highest: dict[str, tuple[float, Figures] | None] = {}
    rate = case.rate
    if case.bound is not None:
        for policy in case.policies:
            on_row(f"{policy}, highest rate")

            def at(tried: float, policy: str = policy) -> Figures:
                trace = case.make(tried)
                # The baseline's batches are short where it is within the bound, so fewer requests suffice.
                part = trace[: max(8, len(trace) // 10)] if policy == BASELINE else trace
                return machine.play(policy, case.limits, part)

            start = case.rate / (16 if policy == BASELINE else 1)
            highest[policy] = highest_rate(at, case.bound, start)
        orca = highest["orca"]
        rate = case.rate if orca is None else orca[0]
    trace = case.make(rate)
    plays = [(policy, policy, trace) for policy in case.policies]
    plays += [(label, policy, make()) for label, policy, make in case.references]
    rows: list[Row] = []
    for label, policy, played in plays:
        on_row(label)
        found = highest.get(policy)
        in_bound = None if found is None else (found[0], found[1].tokens_s)
        rows.append(Row(name, label, rate, machine.play(policy, case.limits, played), in_bound))
    return rows


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
    parser.add_argument("--picture", type=Path, metavar="FILE", help="an SVG")
    flags = parser.parse_args()
    if not 0 < flags.share <= 1:
        parser.error(f"--share is {flags.share:g}; it must be above 0 and at most 1")
    return flags


if __name__ == "__main__":
    main()
