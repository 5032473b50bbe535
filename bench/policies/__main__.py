"""Compares scheduling policies by traces.

    python -m bench.policies [--real] [--trace NAME|FILE ...] [--policy NAME|package.file:Class ...]
                             [--markdown FILE] [--json FILE] [--picture FILE.svg]

Simulated (the default): llama-3.1-8b in bfloat16 on an H200 (--model, --device), at the floors of the cost
model, with the sizes that `orca plan` gives; nothing else in it is simulated. --real: a model of GPT-2's size
with random weights on this machine's CPU, with fewer and shorter requests. --trace FILE plays the requests
that `orca bench --trace FILE` sends (docs/load.md), with the same arrivals, lengths and prefixes. Times in
tables are in milliseconds: mean latency, normalized latency (end to end over output tokens), to the first
token, and between two tokens of a request; "in use" is the fraction of a batch's slots that have tokens,
"twice" the tokens computed again after preemptions, "cached" the fraction of prompt tokens from the prefix
cache. "tok/s in bound" is the throughput at the highest rate with a median normalized latency within the
bound.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.policies.cases import Case, file_case, real_cases, simulated_cases
from bench.policies.comparison import Machine, compare
from bench.policies.picture import picture
from bench.policies.policies import POLICIES, sizes_of
from bench.policies.real import RealMachine
from bench.policies.simulated import SimulatedMachine
from bench.policies.table import Row, markdown_table, text_table
from orca_jax.errors import ConfigError
from orca_jax.families.presets import PRESETS
from orca_jax.planning.known_devices import GPUS
from server.errors import TraceError
from server.load.workload import Requests


def main() -> None:
    """Compare, print tables and, as the last line, JSON."""
    parser, flags = _parsed()
    start = time.perf_counter()
    try:
        cases = _cases(flags)
        for policy in flags.policy or ():
            sizes_of(policy)  # a mistake in its name is reported before anything is compiled
    except (ConfigError, TraceError, OSError) as error:
        parser.error(str(error))
    machine: Machine
    if flags.real:
        model = PRESETS[flags.model or "gpt2"]
        for case in cases.values():
            if case.limits.n_positions > model.n_positions:
                parser.error(
                    f"{case.title} has requests of up to {case.limits.n_positions} tokens, and the model "
                    f"takes {model.n_positions}; give a larger --shrink"
                )
        machine = RealMachine(flags.model or "gpt2")
    else:
        machine = SimulatedMachine(PRESETS[flags.model or "llama-3.1-8b"], GPUS[flags.device])
    rows: list[Row] = []
    titles: dict[str, str] = {}
    for name, case in cases.items():
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


def _cases(flags: argparse.Namespace) -> Mapping[str, Case]:
    """The named cases and files; every case without a name. Raises TraceError, OSError."""
    known = (real_cases if flags.real else simulated_cases)(flags.share)
    cases: dict[str, Case] = {}
    for name in flags.trace or known:
        if name in known:
            cases[name] = known[name]
            continue
        requests = Requests(
            number=flags.requests,
            n_input=(1, 1),
            n_output=(1, 1),
            vocab_size=flags.vocab_size,
            seed=flags.seed,
            file=Path(name),
            speed=flags.speed,
            shrink=flags.shrink,
        )
        max_batch_size = flags.max_batch_size or (16 if flags.real else 128)
        cases[Path(name).name] = file_case(
            requests, max_batch_size=max_batch_size, n_slots=flags.n_slots, rate=flags.rate
        )
    if flags.policy:
        cases = {name: replace(case, policies=tuple(flags.policy)) for name, case in cases.items()}
    return cases


def _progress(name: str, label: str) -> None:
    print(f"{name}: {label}", file=sys.stderr, flush=True)


def _parsed() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    names = [*simulated_cases()]
    parser = argparse.ArgumentParser(
        prog="python -m bench.policies",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        epilog=f"policies: {', '.join(POLICIES)}",
    )
    parser.add_argument("--real", action="store_true", help="on this machine's CPU (default: simulated)")
    parser.add_argument(
        "--trace",
        action="append",
        metavar="NAME|FILE",
        help=f"only this trace; may be repeated. Names: {', '.join(names)}",
    )
    parser.add_argument(
        "--policy", action="append", metavar="NAME|CLASS", help="only this policy; may be repeated"
    )
    parser.add_argument("--share", type=float, default=1.0, help="the share of a named trace (default: 1)")
    parser.add_argument("--requests", type=int, help="the first N of a file (default: all)")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster a file's requests arrive")
    parser.add_argument(
        "--rate", type=float, help="requests of a file a second, instead of its arrivals (texts have none)"
    )
    parser.add_argument("--shrink", type=int, default=1, help="keep one in N tokens of a file's requests")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts of a file (default: 0)")
    parser.add_argument("--vocab-size", type=int, default=1000, help="of these prompts (default: 1000)")
    parser.add_argument(
        "--model",
        choices=sorted(PRESETS),
        metavar="PRESET",
        help="default: llama-3.1-8b; with --real gpt2",
    )
    parser.add_argument(
        "--device", choices=sorted(GPUS), default="h200", help="the simulated one (default: h200)"
    )
    parser.add_argument("--max-batch-size", type=int, help="for a file (default: 128; --real: 16)")
    parser.add_argument("--n-slots", type=int, help="for a file (default: what fits)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables in markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write an SVG")
    flags = parser.parse_args()
    if not 0 < flags.share <= 1:
        parser.error(f"--share is {flags.share:g}; it must be above 0 and at most 1")
    for name in ("requests", "speed", "rate", "shrink", "vocab_size", "max_batch_size", "n_slots"):
        value = getattr(flags, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    return parser, flags


if __name__ == "__main__":
    main()
