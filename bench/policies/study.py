"""Six public traces by nine policies, simulated: `python -m bench.policies.study [--markdown FILE]`.

llama-3.1-8b in bfloat16 on an H200 by the cost model's floors, as in bench.policies. The traces are the
samples in bench/traces, as fast as makes the default policy busy but not overloaded for long.
docs/policy-study.md has the tables, and what they say.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.policies.cases import file_case
from bench.policies.figures import Figures
from bench.policies.policies import COMPARED
from bench.policies.simulated import SimulatedMachine
from orca_jax.families.presets import PRESETS
from orca_jax.planning.known_devices import GPUS
from server.load.workload import Requests

FOLDER = Path(__file__).parents[1] / "traces"
MAX_BATCH_SIZE = 64


@dataclass(frozen=True, slots=True)
class Studied:
    """A trace of the study: its file, the number of requests, and how much faster they arrive."""

    title: str
    file: str
    requests: int
    speed: float


TRACES = (
    Studied("Azure 2023, code", "azure_2023_code.csv.gz", 600, 3.0),
    Studied("Azure 2023, conversation", "azure_2023_conv.csv.gz", 600, 7.0),
    Studied("Mooncake, conversation", "mooncake_conversation.jsonl.gz", 120, 0.3),
    Studied("AgentX, coding agents", "agentx.jsonl.gz", 70, 4.0),
    Studied("ServeGen, M-small", "servegen_m_small", 2000, 12.0),
    Studied("ServeGen, DeepSeek-R1", "servegen_deepseek_r1", 400, 3.0),
)
HEADER = (
    *("policy", "tok/s", "latency", "p99", "first p50", "p99", "between p99", "preempted", "twice", "cached"),
)


def play(job: tuple[Studied, str]) -> Figures:
    """Play a trace with a policy."""
    studied, policy = job
    requests = Requests(
        number=studied.requests,
        n_input=(1, 1),
        n_output=(1, 1),
        vocab_size=1000,
        seed=0,
        file=FOLDER / studied.file,
        speed=studied.speed,
    )
    case = file_case(requests, max_batch_size=MAX_BATCH_SIZE)
    machine = SimulatedMachine(PRESETS["llama-3.1-8b"], GPUS["h200"])
    return machine.play(policy, case.limits, case.make(case.rate))


def table(studied: Studied, policies: Sequence[str], figures: Sequence[Figures]) -> str:
    """A Markdown table: seconds, but for the time between tokens, in milliseconds."""
    speed = "as recorded" if studied.speed == 1 else f"{studied.speed:g} times as fast"
    lines = [
        f"**{studied.title}**: {figures[0].n_requests} requests, {speed}",
        "",
        "| " + " | ".join(HEADER) + " |",
        "| --- |" + " ---: |" * (len(HEADER) - 1),
    ]
    for policy, each in zip(policies, figures, strict=True):
        times = (each.latency_mean, each.latency_p99, each.first_p50, each.first_p99)
        cells = [
            *(policy, f"{each.tokens_s:,.0f}", *(f"{seconds:.2f}" for seconds in times)),
            *(f"{each.between_p99 * 1e3:.1f}", f"{each.n_preemptions:,}", f"{each.n_recomputed:,}"),
            f"{each.cached_share:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Play all traces with all policies, print the tables and, as the last line, JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.policies.study",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--policy", action="append", help=f"default: {', '.join(COMPARED)}")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    flags = parser.parse_args()
    policies = flags.policy or COMPARED
    start = time.perf_counter()
    jobs = [(studied, policy) for studied in TRACES for policy in policies]
    played: list[Figures] = []
    with multiprocessing.get_context("spawn").Pool(flags.processes) as pool:
        for (studied, policy), figures in zip(jobs, pool.imap(play, jobs), strict=True):
            print(f"{studied.title}: {policy}", file=sys.stderr, flush=True)
            played.append(figures)
    n = len(policies)
    parts = [played[i : i + n] for i in range(0, len(played), n)]
    tables = [table(studied, policies, part) for studied, part in zip(TRACES, parts, strict=True)]
    print("\n\n".join(tables))
    if flags.markdown is not None:
        flags.markdown.write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    rows: list[dict[str, Any]] = [
        {"trace": studied.title, "policy": policy, **figures.record()}
        for (studied, policy), figures in zip(jobs, played, strict=True)
    ]
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"bench": "policies.study", "rows": rows, "wall_seconds": seconds}))


if __name__ == "__main__":
    main()
