"""DistServe's goodput, prefill and decode together or apart (Zhong et al., OSDI 2024, Figure 1).

    python -m bench.reproduced.distserve [--requests 300] [--bandwidth 300] [--picture FILE.svg]

OPT-13B in float16, prompts of 512 tokens and outputs of 64, Poisson arrivals. Goodput is the highest rate for
each GPU at which nine in ten requests have their first token within 0.4 s and their other tokens within 40 ms
on average. Together: one GPU, with prompts before decodes as in vLLM then, or with the default policy here.
Apart: GPUs that compute prompts only, in turn; keys and values then take the link's time (--bandwidth, in
GB/s, one transfer at a time for each prefill GPU) to a GPU that decodes only. Iterations take the cost
model's floors on an A100, or what DistServe's authors measured (bench/reproduced/profile.py).
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.policies.search import highest
from bench.reproduced.chart import Panel, document
from bench.reproduced.models import OPT_13B
from bench.reproduced.played import Cost, Job, floors, per_token, play, poisson_jobs
from bench.reproduced.profile import DISTSERVE, VLLM
from bench.simulate.cluster import Cluster
from bench.simulate.places import Partition
from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.planning.cost_model import IterationShape
from orca_jax.planning.known_devices import GPUS
from orca_jax.scheduling.timeline import RequestRecord

N_INPUT, N_OUTPUT = 512, 64
MOST_FIRST, MOST_BETWEEN = 0.4, 0.04  # seconds, the paper's limits for OPT-13B in Figure 1
SHARE = 0.9  # of the requests that meet each
KV_BYTES = 2 * 2 * OPT_13B.n_layers * OPT_13B.hidden_size  # of a token, float16
N_SLOTS = 56_000  # 0.9 of 80 GB, less 26 GB of weights
PREFILL_FIRST = SchedulingConfig(
    policy="examples.policies.prefill_first:PrefillFirst", chunked_prefill=False, prefix_caching=False
)
CHUNKED = SchedulingConfig(prefix_caching=False, prefill_tokens=512)
# What the paper says (text of section 1 and Figure 1), for each GPU.
PAPER = {"together": 1.6, "prefill only": 5.6, "decode only": 10.0, "apart, 2 + 1": 3.3}


@dataclass(frozen=True, slots=True)
class Seen:
    """A request's time to the first token, and its mean time between tokens, in seconds."""

    first: float
    between: float


def serving(scheduling: SchedulingConfig, max_batch_tokens: int) -> ServingConfig:
    """An engine without overlap, as those systems were."""
    return ServingConfig(
        max_batch_size=256,
        n_slots=N_SLOTS,
        max_batch_tokens=max_batch_tokens,
        overlap=False,
        scheduling=scheduling,
    )


def together(jobs: Sequence[Job], cost: Cost, scheduling: SchedulingConfig = PREFILL_FIRST) -> list[Seen]:
    """One GPU for both phases."""
    records = play(serving(scheduling, 2048), cost, jobs)
    return [Seen(one.token_times[0] - one.arrived, per_token(one)) for one in records]


def prefilled(jobs: Sequence[Job], cost: Cost, n_gpus: int) -> list[RequestRecord]:
    """The records of the first tokens, by `n_gpus` that compute prompts and take requests in turn."""
    config = serving(PREFILL_FIRST, N_INPUT)  # one prompt fills the GPU: batching two only delays the first
    records: list[RequestRecord | None] = [None] * len(jobs)
    for gpu in range(n_gpus):
        part = [replace(job, n_output=1, limit=1) for job in jobs[gpu::n_gpus]]
        records[gpu::n_gpus] = play(config, cost, part)
    return [record for record in records if record is not None]


def decoded(jobs: Sequence[Job], cost: Cost, n_gpus: int) -> list[RequestRecord]:
    """The records of the tokens after the first, by `n_gpus` that decode only.

    A job arrives with its prompt's keys and values, so that its first iteration is a decode too: it counts as
    one token, whose keys are the whole prompt's and its own.
    """

    def decodes(shape: IterationShape) -> float:
        return cost(IterationShape([1] * len(shape.kv_lengths), shape.kv_lengths))

    config = serving(replace(PREFILL_FIRST, policy="default"), N_SLOTS)
    records: list[RequestRecord | None] = [None] * len(jobs)
    for gpu in range(n_gpus):
        records[gpu::n_gpus] = play(config, decodes, jobs[gpu::n_gpus])
    return [record for record in records if record is not None]


def apart(jobs: Sequence[Job], cost: Cost, *, n_prefill: int, n_decode: int, bandwidth: float) -> list[Seen]:
    """`n_prefill` GPUs for the first tokens and `n_decode` for the others; `bandwidth` in bytes a second.

    The prefill GPUs' memory holds what waits for the link; nothing holds them up.
    """
    firsts = [record.token_times[0] for record in prefilled(jobs, cost, n_prefill)]
    link_free = [0.0] * n_prefill
    moved: list[tuple[float, int]] = []
    for i in sorted(range(len(jobs)), key=lambda i: firsts[i]):
        gpu = i % n_prefill
        link_free[gpu] = max(link_free[gpu], firsts[i]) + jobs[i].n_input * KV_BYTES / bandwidth
        moved.append((link_free[gpu], i))
    moved.sort()
    arrivals = [Job(at, jobs[i].n_input + 1, jobs[i].n_output - 1, jobs[i].limit - 1) for at, i in moved]
    seen = [Seen(0.0, 0.0)] * len(jobs)
    for (_, i), record in zip(moved, decoded(arrivals, cost, n_decode), strict=True):
        between = (record.token_times[-1] - firsts[i]) / (jobs[i].n_output - 1)
        seen[i] = Seen(firsts[i] - jobs[i].arrival, between)
    return seen


def p90(seen: Sequence[Seen]) -> tuple[float, float]:
    """The times within which SHARE of the requests have their first token, and their others."""
    first, between = ([getattr(one, name) for one in seen] for name in ("first", "between"))
    return float(np.quantile(first, SHARE)), float(np.quantile(between, SHARE))


def meets(seen: Sequence[Seen]) -> bool:
    """Whether enough requests are within each limit."""
    first, between = p90(seen)
    return first <= MOST_FIRST and between <= MOST_BETWEEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Systems:
    """The systems compared with one cost: of one engine together, and of one apart."""

    title: str
    together: Cost
    apart: Cost
    n_requests: int
    bandwidth: float

    def jobs(self, rate: float) -> list[Job]:
        """The requests at a rate."""
        return poisson_jobs([(N_INPUT, N_OUTPUT)] * self.n_requests, rate)

    def seen(self, name: str, rate: float) -> list[Seen]:
        """The latencies that clients see of a system at `rate` requests a second for each GPU."""
        if name.startswith("together"):
            scheduling = CHUNKED if name.endswith("chunked") else PREFILL_FIRST
            cost = self.apart if name.endswith("same engine") else self.together
            return together(self.jobs(rate), cost, scheduling)
        if name == "prefill only":
            records = prefilled(self.jobs(rate), self.apart, 1)
            return [Seen(one.token_times[0] - one.arrived, 0.0) for one in records]
        if name == "decode only":
            jobs = [replace(job, n_input=N_INPUT + 1, n_output=N_OUTPUT - 1) for job in self.jobs(rate)]
            records = decoded(jobs, self.apart, 1)
            return [Seen(0.0, (one.token_times[-1] - one.arrived) / (N_OUTPUT - 1)) for one in records]
        n_prefill, n_decode = (int(part) for part in name.removeprefix("apart, ").split(" + "))
        jobs = self.jobs((n_prefill + n_decode) * rate)
        return apart(jobs, self.apart, n_prefill=n_prefill, n_decode=n_decode, bandwidth=self.bandwidth)

    def goodput(self, name: str, start: float = 2.0) -> float:
        """The highest rate for each GPU that meets the limits."""
        return highest(lambda rate: meets(self.seen(name, rate)), start)


NAMES = (
    *("together", "together, same engine", "together, chunked", "prefill only", "decode only"),
    *("apart, 2 + 1", "apart, 1 + 1"),
)


def compared(n_requests: int, bandwidth: float) -> list[Systems]:
    """The costs: nothing fitted, and measured by the authors."""
    device = Cluster(device=GPUS["a100-80gb"])
    floor = floors(Partition(model=OPT_13B, n_stages=1, n_devices=1), device)
    sizes: dict[str, Any] = {"n_requests": n_requests, "bandwidth": bandwidth}
    return [
        Systems(title="floors", together=floor, apart=floor, **sizes),
        Systems(title="the authors' times", together=VLLM, apart=DISTSERVE, **sizes),
    ]


def picture(systems: Systems, goodputs: Mapping[str, float]) -> str:
    """Both latencies over the rate for each GPU, as in Figure 1."""
    most = 1.15 * max(goodputs["apart, 2 + 1"], goodputs["together"])
    shown = ("together", "together, chunked", "apart, 2 + 1")
    rates = [most * i / 12 for i in range(1, 13)]
    points = {name: [(rate, *p90(systems.seen(name, rate))) for rate in rates] for name in shown}
    x_label = "requests a second for each GPU"
    return document(
        [
            Panel(
                title=f"First token ({systems.title})",
                x_label=x_label,
                y_label="90 % within, seconds",
                lines={name: [(rate, first) for rate, first, _ in line] for name, line in points.items()},
                marks={"limit": MOST_FIRST},
                most_y=3 * MOST_FIRST,
            ),
            Panel(
                title=f"Between tokens ({systems.title})",
                x_label=x_label,
                y_label="90 % within, ms",
                lines={
                    name: [(rate, between * 1e3) for rate, _, between in line]
                    for name, line in points.items()
                },
                marks={"limit": MOST_BETWEEN * 1e3},
                most_y=3e3 * MOST_BETWEEN,
            ),
        ]
    )


def main() -> None:
    """Search, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.reproduced.distserve",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=300, help="at each rate (default: 300)")
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=300.0,
        help="of the link from a prefill GPU, in GB/s (default: 300, NVLink of an A100)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write an SVG")
    flags = parser.parse_args()
    if flags.requests < 1 or not flags.bandwidth > 0:
        parser.error("--requests and --bandwidth must be above 0")
    start = time.perf_counter()
    table = Table(title="goodput: requests a second for each GPU within the limits")
    for column in ("", "the paper", *(each.title for each in compared(1, 1.0))):
        table.add_column(column, justify="right" if column else "left")
    results: dict[str, dict[str, float]] = {}
    for systems in compared(flags.requests, flags.bandwidth * 1e9):
        results[systems.title] = {name: systems.goodput(name) for name in NAMES}
    for name in NAMES:
        paper = f"{PAPER[name]:g}" if name in PAPER else ""
        table.add_row(name, paper, *(f"{goodputs[name]:.2f}" for goodputs in results.values()))
    for what, of in (("apart, 2 + 1", name) for name in NAMES[:3]):
        paper = f"{PAPER[what] / PAPER[of]:.1f}" if of in PAPER else ""
        table.add_row(f"{what} / {of}", paper, *(f"{each[what] / each[of]:.2f}" for each in results.values()))
    Console(width=120).print(table)
    if flags.picture is not None:
        systems = compared(flags.requests, flags.bandwidth * 1e9)[1]
        flags.picture.write_text(picture(systems, results[systems.title]), encoding="utf-8")
    seconds = round(time.perf_counter() - start, 1)
    print(
        json.dumps(
            {"bench": "reproduced.distserve", "paper": PAPER, "goodput": results, "wall_seconds": seconds}
        )
    )


if __name__ == "__main__":
    main()
