"""PagedAttention's batches and wasted memory (Kwon et al., SOSP 2023, Figures 2 and 13).

    python -m bench.reproduced.paged_attention [--requests 800] [--picture FILE.svg]

OPT-13B in float16 on one A100 of 40 GB with 15,700 slots (the paper's Table 1); log-normal lengths with the
means of its ShareGPT and Alpaca, at the rates of its Figure 13. vLLM is prompts before decodes and blocks on
demand. Orca is Algorithm 1 with contiguous slots from a buddy allocator (bench/reproduced/buddy.py) for the
model's 2,048 tokens (Max), for outputs rounded up to a power of two (Pow2), or for the real length (Oracle).
Iterations take the cost model's floors, or what DistServe's authors measured of vLLM on an A100 of 80 GB,
longer by the ratio of the memories' bandwidths.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.reproduced.chart import Bars, document
from bench.reproduced.models import OPT_13B
from bench.reproduced.played import Cost, Job, Stop, floors, play, poisson_jobs
from bench.reproduced.profile import VLLM
from bench.simulate.cluster import Cluster
from bench.simulate.places import Partition
from bench.simulate.workload import lognormal_lengths
from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.planning.known_devices import GPUS
from orca_jax.request.request import Request, Row
from orca_jax.scheduling.blocks import round_up
from orca_jax.scheduling.timeline import IterationRecord, RequestRecord, TimelineObserver

N_SLOTS, N_POSITIONS, BLOCK_SIZE = 15_700, 2048, 16
SYSTEMS = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM")
PARTS = ("tokens", "reserved", "internal", "external")
# Figure 2 in percent: token states, reservation, internal fragmentation, external fragmentation and others.
PAPER_MEMORY = {
    "Orca (Max)": (20.4, 13.3, 57.3, 8.9),
    "Orca (Pow2)": (26.8, 17.9, 13.6, 41.6),
    "Orca (Oracle)": (38.2, 25.2, 0.0, 36.6),
    "vLLM": (96.3,),
}


@dataclass(frozen=True, slots=True)
class Dataset:
    """Mean tokens in and out (Figure 11), requests a second, and the mean batches (Figure 13)."""

    n_input: float
    n_output: float
    rate: float
    paper_batch: Mapping[str, float]

    def lengths(self, n: int, sigma: float) -> list[tuple[int, int]]:
        """Draw `n` requests with log-normal lengths; no more than fit the model, half in and half out."""
        inputs = lognormal_lengths(n, self.n_input, sigma, N_POSITIONS // 2, seed=1)
        outputs = lognormal_lengths(n, self.n_output, sigma, N_POSITIONS // 2, seed=2)
        return [*zip(inputs.tolist(), outputs.tolist(), strict=True)]


DATASETS = {
    "ShareGPT": Dataset(161.31, 337.99, 2.0, dict(zip(SYSTEMS, (7.00, 9.81, 13.62, 30.42), strict=True))),
    "Alpaca": Dataset(19.31, 58.45, 30.0, dict(zip(SYSTEMS, (7.00, 43.24, 72.75, 132.44), strict=True))),
}
SIGMA = 1.0  # of the lengths' logarithms; the paper gives means and histograms


@dataclass(slots=True)
class Memory(TimelineObserver):
    """Admitted requests and the use of slots, over time: sums of seconds times requests, or times slots.

    Of what a request has, `tokens` have keys and values, `reserved` slots will have, and `internal` ones
    never; `external` is the rest, with what rounding to powers of two takes. Nothing counts after `until`.
    """

    contiguous: bool
    until: float
    seconds: float = 0.0
    requests: float = 0.0
    slots: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    largest: int = 0  # the most requests at a time
    _live: dict[Request, None] = field(default_factory=dict[Request, None])
    _at: float = 0.0
    _counts: tuple[int, dict[str, int]] = (0, {})

    def issued(self, record: IterationRecord, rows: Sequence[Row]) -> None:
        now = min(record.issued, self.until)
        n_requests, counts = self._counts
        self.seconds += now - self._at
        self.requests += (now - self._at) * n_requests
        for name, count in counts.items():
            self.slots[name] += (now - self._at) * count
        self._at = now
        known = {req: req.n_computed for req in self._live if req.row >= 0}
        known.update((req, req.n_computed + n) for req, n in rows)
        self._live.update(dict.fromkeys(known))
        self._counts = len(known), self._use(known)
        self.largest = max(self.largest, len(known))

    def ended(self, record: RequestRecord, request: Request) -> None:
        self._live.pop(request, None)

    def _use(self, known: Mapping[Request, int]) -> dict[str, int]:
        tokens, reserved, asked = sum(known.values()), 0, 0
        for req, n in known.items():
            if self.contiguous:
                assert isinstance(req.sink, Stop)
                reserved += req.n_input + req.sink.n_output - n
                asked += req.max_tokens
            else:
                asked += round_up(n, BLOCK_SIZE)
        counts = (tokens, reserved, asked - tokens - reserved, N_SLOTS - asked)
        return dict(zip(PARTS, counts, strict=True))

    @property
    def mean_batch(self) -> float:
        """Requests per batch."""
        return self.requests / self.seconds

    def shares(self, *, of_asked: bool = False) -> dict[str, float]:
        """The fraction of all slots, or of those that requests asked for, by use."""
        parts = {name: n for name, n in self.slots.items() if not (of_asked and name == "external")}
        return {name: n / sum(parts.values()) for name, n in parts.items()}


def limit(system: str, n_input: int, n_output: int) -> int:
    """The output tokens for which a system reserves slots."""
    if system == "Orca (Max)":
        return N_POSITIONS - n_input
    if system == "Orca (Pow2)":
        return 1 << (n_output - 1).bit_length()
    return n_output


def run(system: str, jobs: Sequence[Job], cost: Cost) -> Memory:
    """Play the jobs; measured until the last arrival, because after it nothing new fills the batch."""
    if system == "vLLM":
        policy = "examples.policies.prefill_first:PrefillFirst"
        scheduling = SchedulingConfig(policy=policy, chunked_prefill=False, prefix_caching=False)
    else:
        policy = "bench.reproduced.buddy:BuddyOrca"
        scheduling = SchedulingConfig(
            policy=policy, chunked_prefill=False, prefix_caching=False, reservation="full"
        )
    config = ServingConfig(
        max_batch_size=256, n_slots=N_SLOTS, max_batch_tokens=2560, overlap=False, scheduling=scheduling
    )
    memory = Memory(contiguous=system != "vLLM", until=jobs[-1].arrival)
    asked = [replace(job, limit=limit(system, job.n_input, job.n_output)) for job in jobs]
    play(config, cost, asked, [memory])
    return memory


def costs() -> Mapping[str, Cost]:
    """Nothing fitted, and measured by DistServe's authors."""
    device, measured_on = GPUS["a100-40gb"], GPUS["a100-80gb"]
    partition = Partition(model=OPT_13B, n_stages=1, n_devices=1)
    slower = replace(VLLM, slowness=measured_on.bandwidth / device.bandwidth)
    return {"floors": floors(partition, Cluster(device=device)), "measured": slower}


def runs(dataset: Dataset, cost: Cost, n_requests: int, sigma: float) -> dict[str, Memory]:
    """Each system's memory."""
    jobs = poisson_jobs(dataset.lengths(n_requests, sigma), dataset.rate)
    return {system: run(system, jobs, cost) for system in SYSTEMS}


def picture(found: Mapping[str, Mapping[str, Memory]]) -> str:
    """The use of memory with ShareGPT's lengths and the mean batches, ours and the paper's."""
    share_gpt = found["ShareGPT"]
    ours = {
        name: ([100 * share for share in memory.shares(of_asked=name == "vLLM").values()], "")
        for name, memory in share_gpt.items()
    }
    paper = {name: (values, "") for name, values in PAPER_MEMORY.items()}
    batches: dict[str, tuple[Sequence[float], str]] = {}
    for name, theirs in DATASETS["ShareGPT"].paper_batch.items():
        batches[name] = ([share_gpt[name].mean_batch], f"{share_gpt[name].mean_batch:.1f}")
        batches[f"{name}, paper"] = ([theirs], f"{theirs:.1f}")
    return document(
        [
            Bars("Slots, ShareGPT: here", PARTS, ours),
            Bars("The paper's Figure 2", PARTS, paper),
            Bars("Requests in a batch, ShareGPT", (), batches),
        ]
    )


def main() -> None:
    """Play, print tables and, as the last line, JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.reproduced.paged_attention",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=800, help="of each dataset (default: 800)")
    parser.add_argument(
        "--sigma", type=float, default=SIGMA, help=f"of the lengths' logarithms (default: {SIGMA:g})"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write an SVG, with the measured times")
    flags = parser.parse_args()
    if flags.requests < 2 or not 0 < flags.sigma <= 2:
        parser.error("--requests must be at least 2, and --sigma above 0 and at most 2")
    start = time.perf_counter()
    console, rows = Console(width=120), list[dict[str, object]]()
    for title, cost in costs().items():
        found = {name: runs(dataset, cost, flags.requests, flags.sigma) for name, dataset in DATASETS.items()}
        for name, memories in found.items():
            table = Table(title=f"{name}, {DATASETS[name].rate:g} requests a second, {title}")
            columns = (
                "",
                "batch",
                "the paper",
                "tokens, %",
                "the paper",
                *(f"{part}, %" for part in PARTS[1:]),
            )
            for i, column in enumerate((*columns, "tokens of asked, %")):
                table.add_column(column, justify="right" if i else "left")
            for system, memory in memories.items():
                shares, of_asked = memory.shares(), memory.shares(of_asked=True)["tokens"]
                tokens, *others = (f"{100 * share:.1f}" for share in shares.values())
                table.add_row(
                    *(
                        system,
                        f"{memory.mean_batch:.2f}",
                        f"{DATASETS[name].paper_batch[system]:.2f}",
                        tokens,
                    ),
                    f"{PAPER_MEMORY[system][0]:.1f}" if name == "ShareGPT" else "",
                    *(*others, f"{100 * of_asked:.1f}"),
                )
                what = {"times": title, "dataset": name, "system": system}
                rows.append({**what, "mean_batch": memory.mean_batch, **shares})
            console.print(table)
        if flags.picture is not None and title == "measured":
            flags.picture.write_text(picture(found), encoding="utf-8")
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"bench": "reproduced.paged_attention", "rows": rows, "wall_seconds": seconds}))


if __name__ == "__main__":
    main()
