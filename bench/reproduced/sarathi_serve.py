"""Sarathi-Serve's stalls and capacity (Agrawal et al., OSDI 2024, Figures 1 and 10, Table 4).

    python -m bench.reproduced.sarathi_serve [--part stalls|tails|ablation|capacity ...] [--picture FILE.svg]

Yi-34B in bfloat16 over two A100 of 80 GB; lengths drawn to have the medians and 90th percentiles of the
paper's datasets (its Table 2), with longer requests left out as there. Sarathi-Serve is the default policy
here with a budget of tokens for each iteration; vLLM is prompts before decodes
(examples/policies/prefill_first.py); "hybrid only" has prompts whole among decodes, as in Orca. Times are the
cost model's floors, once as they are, and once all multiplied by one factor, so that a prompt of 4,095 tokens
takes the 775 ms that the authors measured.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from bench.policies.search import highest
from bench.reproduced.chart import Panel, document
from bench.reproduced.models import YI_34B
from bench.reproduced.played import Cost, Job, first_token, floors, gaps, play, poisson_jobs
from bench.simulate.cluster import Cluster
from bench.simulate.places import Partition
from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.planning.cost_model import IterationShape
from orca_jax.planning.known_devices import GPUS
from orca_jax.scheduling.timeline import RequestRecord

# github.com/microsoft/sarathi-serve, branch osdi-sarathi-serve, at ceaa0660:
# osdi-experiments/figure-9/chunking-overhead.csv, prefill_length 4095 and chunk_size 16384.
MEASURED_TOKENS, MEASURED_SECONDS = 4095, 0.7754438968375325
N_SLOTS = 240_000  # 0.9 of 160 GB, less 69 GB of weights and the activations of long prompts
STRICT, QUEUED = 0.2, 2.0  # seconds: Table 3's limit between tokens, and the median time in the queue (5.1)
STALL = 1.0  # seconds without any token that count as a stall


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset of Table 2: median and 90th percentile of tokens in and out, and the most in all."""

    n_input: tuple[int, int]
    n_output: tuple[int, int]
    most: int

    def lengths(self, n: int, seed: int = 0) -> list[tuple[int, int]]:
        """Draw `n` requests: log-normal lengths that have these quantiles without the longer requests."""
        rng = np.random.default_rng(seed)
        drawn = _within(rng.standard_normal((2, 4 * n + 64)), _parameters(self), self.most)
        return [(int(i), int(o)) for i, o in zip(*drawn[:, :n].tolist(), strict=True)]


CHAT = Dataset((1730, 5696), (415, 834), 8192)  # openchat_sharegpt4
ARXIV = Dataset((7059, 12_985), (208, 371), 16_384)  # arxiv_summarization
DATASETS = {"openchat_sharegpt4": CHAT, "arxiv_summarization": ARXIV}
_Z90 = 1.2815515655446004  # the 90th percentile of a normal variable
Normal = npt.NDArray[np.float64]


def _within(normal: Normal, parameters: Normal, most: int) -> Normal:
    """The lengths in and out, `[2, n]`, of the requests with at most `most` tokens."""
    drawn = np.maximum(1, np.rint(np.exp(parameters[:, :1] + parameters[:, 1:] * normal)))
    return drawn[:, drawn.sum(axis=0) <= most]


@cache
def _parameters(dataset: Dataset) -> Normal:
    """The mean and the deviation of each length's logarithm, `[2, 2]`.

    By fixed-point iteration, so that the quantiles are Table 2's once the longer requests are left out.
    """
    normal = np.random.default_rng(0).standard_normal((2, 1 << 14))
    wanted = np.log([dataset.n_input, dataset.n_output])  # [2 lengths, 2 quantiles]
    parameters = np.stack([wanted[:, 0], (wanted[:, 1] - wanted[:, 0]) / _Z90], axis=1)
    for _ in range(40):
        found = np.log(np.quantile(_within(normal, parameters, dataset.most), (0.5, 0.9), axis=1).T)
        parameters[:, 0] += 0.5 * (wanted[:, 0] - found[:, 0])
        parameters[:, 1] *= ((wanted[:, 1] - wanted[:, 0]) / (found[:, 1] - found[:, 0])) ** 0.5
    return parameters


# Systems.


def vllm(dataset: Dataset, max_batch_size: int = 128) -> ServingConfig:
    """vLLM of early 2024: iterations of prompts only while one fits, otherwise of decodes."""
    scheduling = SchedulingConfig(
        policy="examples.policies.prefill_first:PrefillFirst", chunked_prefill=False, prefix_caching=False
    )
    return _serving(scheduling, dataset.most, max_batch_size)


def sarathi(budget: int, max_batch_size: int = 128) -> ServingConfig:
    """Sarathi-Serve: decodes first, then chunks of prompts, up to `budget` tokens in all."""
    return _serving(SchedulingConfig(prefix_caching=False, prefill_tokens=budget), budget, max_batch_size)


def hybrid(dataset: Dataset) -> ServingConfig:
    """Prompts whole among decodes: the same with a budget that holds any prompt (the authors' script too)."""
    return sarathi(dataset.most)


def orca(dataset: Dataset) -> ServingConfig:
    """Orca in the paper's capacity search: prompts whole among decodes, up to 16 requests."""
    scheduling = SchedulingConfig(chunked_prefill=False, prefix_caching=False, reservation="full")
    return _serving(scheduling, 16 * dataset.most, 16)


def _serving(scheduling: SchedulingConfig, max_batch_tokens: int, max_batch_size: int) -> ServingConfig:
    return ServingConfig(
        max_batch_size=max_batch_size,
        n_slots=N_SLOTS,
        max_batch_tokens=max_batch_tokens,
        overlap=False,
        scheduling=scheduling,
    )


def costs() -> Mapping[str, tuple[float, Cost]]:
    """The factor and the cost with nothing fitted, and with one factor."""
    partition = Partition(model=YI_34B, n_stages=1, n_devices=2, dtype="bfloat16")
    floor = floors(partition, Cluster(device=GPUS["a100-80gb"]))
    factor = MEASURED_SECONDS / floor(IterationShape([MEASURED_TOKENS], [MEASURED_TOKENS]))
    fitted = floors(partition, Cluster(device=GPUS["a100-80gb"], slowness=factor))
    return {"floors": (1.0, floor), "one factor": (factor, fitted)}


# Figure 1a: stalls.


def token_times(records: Sequence[RequestRecord]) -> list[float]:
    """When each token came, of all requests, ascending."""
    return sorted(at for one in records for at in one.token_times)


def stalls(records: Sequence[RequestRecord]) -> list[float]:
    """The times of at least STALL seconds in which no request got a token, after the first token."""
    pauses = np.diff(np.unique(token_times(records)))
    return [float(pause) for pause in pauses if pause >= STALL]


def stall_runs(cost: Cost, n_requests: int) -> dict[str, list[RequestRecord]]:
    """Papers to summarize, all at once: vLLM, and Sarathi-Serve with 1,536 tokens (the authors' script)."""
    jobs = [Job(0.0, i, o, o) for i, o in ARXIV.lengths(n_requests)]
    systems = {"vLLM": vllm(ARXIV, 256), "Sarathi-Serve": sarathi(1536, 256)}
    return {name: play(system, cost, jobs) for name, system in systems.items()}


# Figure 1b: the tail between tokens, by load.

TAIL_RATES = (0.55, 0.7, 1.0)
# Read off the published bars: approximate.
PAPER_TAILS = {"vLLM": (0.5, 0.85, 1.3), "Sarathi-Serve": (0.3, 0.3, 0.3)}


def tails(cost: Cost, n_requests: int) -> dict[str, list[float]]:
    """The 99th percentile between tokens, in seconds, at each rate."""
    systems = {"vLLM": vllm(CHAT, 256), "Sarathi-Serve": sarathi(1536, 256)}
    return {
        name: [_p99(play(system, cost, poisson_jobs(CHAT.lengths(n_requests), rate))) for rate in TAIL_RATES]
        for name, system in systems.items()
    }


def _p99(records: Sequence[RequestRecord]) -> float:
    return float(np.quantile(gaps(records), 0.99))


# Table 4: either technique alone. The rates are the authors' script's.

ABLATION = {"openchat_sharegpt4": 1.0, "arxiv_summarization": 0.5}
PAPER_ABLATION = {
    "hybrid only": {"openchat_sharegpt4": (0.53, 0.68), "arxiv_summarization": (3.78, 1.38)},
    "Sarathi-Serve": {"openchat_sharegpt4": (0.76, 0.14), "arxiv_summarization": (3.90, 0.17)},
}
BUDGET = 1024  # the paper's; the script has 512


def ablation(cost: Cost, n_requests: int) -> dict[str, dict[str, tuple[float, float]]]:
    """The median time to the first token and the 99th percentile between tokens, in seconds."""
    found: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in PAPER_ABLATION}
    for dataset, rate in ABLATION.items():
        lengths = DATASETS[dataset]
        systems = {"hybrid only": hybrid(lengths), "Sarathi-Serve": sarathi(BUDGET)}
        for name, system in systems.items():
            records = play(system, cost, poisson_jobs(lengths.lengths(n_requests), rate))
            found[name][dataset] = first_token(records, 0.5), _p99(records)
    return found


# Figure 10: the highest load within limits.

# The text of 5.1: 4.0 times Orca's and 3.7 times vLLM's (Yi-34B, openchat_sharegpt4, strict).
PAPER_CAPACITY = {"Orca": 1 / 4.0, "vLLM": 1 / 3.7, "Sarathi-Serve": 1.0}


def capacity(cost: Cost, n_requests: int, between: float = STRICT) -> dict[str, float]:
    """The highest rate with 99 % of the times between tokens within the limit, and no growing queue."""
    lengths = CHAT.lengths(n_requests)

    def meets(system: ServingConfig, rate: float) -> bool:
        records = play(system, cost, poisson_jobs(lengths, rate))
        queued = float(np.median([one.queue_time or 0.0 for one in records]))
        return queued <= QUEUED and _p99(records) <= between

    systems = {"Orca": orca(CHAT), "vLLM": vllm(CHAT), "Sarathi-Serve": sarathi(512)}
    return {name: highest(partial(meets, system), 0.5) for name, system in systems.items()}


def picture(runs: Mapping[str, Sequence[RequestRecord]], tail: Mapping[str, Sequence[float]]) -> str:
    """Tokens over time, and the tail between tokens by load, as in Figure 1."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, records in runs.items():
        times, counts = np.unique(token_times(records), return_counts=True)
        lines[name] = [*zip(times.tolist(), (np.cumsum(counts) / 1e3).tolist(), strict=True)]
    return document(
        [
            Panel(title="Tokens generated", x_label="seconds", y_label="thousands", lines=lines),
            Panel(
                title="Between tokens, 99th percentile",
                x_label="requests a second",
                y_label="seconds",
                lines={
                    **{name: [*zip(TAIL_RATES, values, strict=True)] for name, values in tail.items()},
                    **{
                        f"{name}, the paper": [*zip(TAIL_RATES, values, strict=True)]
                        for name, values in PAPER_TAILS.items()
                    },
                },
            ),
        ]
    )


PARTS: Mapping[str, Callable[[Cost, int], Any]] = {
    "stalls": stall_runs,
    "tails": tails,
    "ablation": ablation,
    "capacity": capacity,
}


def main() -> None:
    """Play each part with each cost, print tables and, as the last line, JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.reproduced.sarathi_serve",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--part", action="append", choices=[*PARTS], help="default: all")
    parser.add_argument(
        "--requests", type=int, default=128, help="of each run (default: 128, as in the paper)"
    )
    parser.add_argument(
        "--capacity-requests",
        type=int,
        default=192,
        help="at each rate of the capacity search (default: 192)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write an SVG, with one factor")
    flags = parser.parse_args()
    if flags.requests < 2 or flags.capacity_requests < 2:
        parser.error("--requests and --capacity-requests must be at least 2")
    start = time.perf_counter()
    parts = flags.part or [*PARTS]
    if flags.picture is not None and not {"stalls", "tails"} <= {*parts}:
        parser.error("--picture needs the parts stalls and tails")
    results: dict[str, dict[str, Any]] = {}
    console, drawn = Console(width=120), ""
    for title, (factor, cost) in costs().items():
        n = flags.requests
        found = {
            part: PARTS[part](cost, flags.capacity_requests if part == "capacity" else n) for part in parts
        }
        if flags.picture is not None:
            drawn = picture(found["stalls"], found["tails"])
        if "stalls" in found:
            found["stalls"] = {
                name: {
                    "seconds": max(one.token_times[-1] for one in records),
                    "stalls": len(stalls(records)),
                    "longest": max(stalls(records), default=0.0),
                }
                for name, records in found["stalls"].items()
            }
        results[title] = {"factor": round(factor, 3), **found}
        for part in parts:
            console.print(_table(part, f"{part}, {title} ({factor:.2f})", found[part]))
    if flags.picture is not None:
        flags.picture.write_text(drawn, encoding="utf-8")
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"bench": "reproduced.sarathi_serve", **results, "wall_seconds": seconds}))


def _table(part: str, title: str, found: Any) -> Table:
    table = Table(title=title)
    columns = {
        "stalls": ("", "seconds in all", f"stalls over {STALL:g} s", "the longest, s"),
        "tails": ("p99 between tokens, s", *(f"{rate:g}/s (paper)" for rate in TAIL_RATES)),
        "ablation": ("first token p50, between p99, s", *(f"{name} (paper)" for name in ABLATION)),
        "capacity": ("", "requests a second", "of Sarathi-Serve's", "the paper"),
    }[part]
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for name, value in found.items():
        if part == "stalls":
            cells = [f"{value['seconds']:.0f}", str(value["stalls"]), f"{value['longest']:.1f}"]
        elif part == "tails":
            cells = [f"{ours:.2f} ({its:.2f})" for ours, its in zip(value, PAPER_TAILS[name], strict=True)]
        elif part == "ablation":
            cells = [
                "{:.2f}, {:.2f} ({:.2f}, {:.2f})".format(*value[one], *PAPER_ABLATION[name][one])
                for one in ABLATION
            ]
        else:
            whole = found["Sarathi-Serve"] or math.nan
            cells = [f"{value:.2f}", f"{value / whole:.2f}", f"{PAPER_CAPACITY[name]:.2f}"]
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    main()
