"""Measures the host's work per iteration: everything between two launches, without a device.

The real request pool, scheduler, K/V manager and engine master run on a worker that returns tokens at once.
Every iteration has the given number of rows; in each, one request ends, one is admitted from the front of the
queue, and one arrives (which is not timed). The target is 500 microseconds at 256 rows, linear in rows and
independent of the number of waiting requests, for Algorithm 1 and for the default policy, whose prefix cache
is full: each new block evicts another, whatever the cache's size.

With drafts a quarter as many requests have as many rows, of their newest token and three drafts by n-grams,
all of which are right. The target is 1.3 times the work without drafts.

    python -m bench.host_work [--iterations N]
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from orca_jax.config import ORCA, SchedulingConfig, ServingConfig
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.iteration.flat_batch import BatchSizes, batch_sizes
from orca_jax.iteration.message import ControlMessage, MakeWords
from orca_jax.iteration.rows.drafted import Drafted
from orca_jax.iteration.shape import EngineShape, bucket_sizes
from orca_jax.request.request import Request
from orca_jax.request.sampled import Sampled
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.blocks import round_up
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_lookup import hash_prompt
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.speculation.drafter import configured_speculation

AIM_US = 500.0  # at 256 rows
AIM_WITH_DRAFTS = 1.3  # times the work without drafts, at 256 rows
# Rows, waiting requests, the blocks in the prefix cache (None: Algorithm 1), and each request's drafts.
CASES: tuple[tuple[int, int, int | None, int], ...] = (
    *((256, n_waiting, None, 0) for n_waiting in (0, 1_000, 100_000)),
    *((n_rows, 0, None, 0) for n_rows in (32, 64, 128, 512)),
    *((256, n_waiting, 1_000, 0) for n_waiting in (0, 100_000)),
    (256, 0, 1_000, 3),
    (256, 0, 100_000, 0),
)
N_INPUT = 64
BLOCK_SIZE = 16
VOCAB_SIZE = 50257
MODEL_LENGTH = 2048  # tokens: the width of the block table
WARM_UP = 20  # after the first requests, which begin together and so need new blocks together, have ended

# Each part's name, and the methods of the engine's objects that belong to it.
PARTS = {
    "blocks": (("kv", "reserve"), ("kv", "release")),
    "pool": (("pool", "admit"), ("pool", "take_ending"), ("pool", "remove"), ("pool", "deliver")),
    "timeline": (("timeline", "issued"), ("timeline", "returned"), ("timeline", "delivered")),
    "issue": (("engine", "issue"),),
    "wait": (("engine", "wait"),),
}
COLUMNS = (
    "select",
    "control message",
    "flat batch",
    "wait",
    "blocks",
    "pool",
    "timeline",
    "states and tokens",
)


class InstantTokens:
    """Tokens that are ready at once."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled

    def is_ready(self) -> bool:
        return True

    def wait(self, seconds: float) -> None:
        raise AssertionError("they are ready")

    def fetch(self) -> Sampled:
        return self._sampled


class InstantWorkers:
    """Builds each flat batch, returns tokens at once, and keeps the newest message."""

    def __init__(self, sizes: BatchSizes) -> None:
        self.message: ControlMessage | None = None
        self._sizes = sizes

    def issue(self, message: ControlMessage, words: MakeWords) -> InstantTokens:
        """Return token 0 for every row."""
        self.message = message
        flat = self._sizes.lay_out(message)
        return InstantTokens(Sampled(np.zeros(flat.layout.n_rows, np.int32)))


class Serving:
    """An engine in steady state: `n_rows` requests run, `n_waiting` wait.

    Algorithm 1 schedules, or with `n_cached_blocks` the default policy with that many idle blocks cached.
    With `n_drafts` fewer requests have as many rows.
    """

    def __init__(
        self, n_rows: int, n_waiting: int, n_cached_blocks: int | None = None, n_drafts: int = 0
    ) -> None:
        self.n_rows = n_rows
        self.n_drafts = n_drafts
        self.n_requests = 0
        per_request = round_up(N_INPUT + n_rows, BLOCK_SIZE)
        n_slots = n_rows * per_request + (n_cached_blocks or 0) * BLOCK_SIZE
        self.config = ServingConfig(
            max_batch_size=n_rows,
            n_slots=n_slots,
            max_batch_tokens=n_rows * N_INPUT,  # so that the first iteration admits all of them
            block_size=BLOCK_SIZE,
            overlap=False,  # a batch of all rows, then its return: nothing runs on a device meanwhile
            scheduling=ORCA if n_cached_blocks is None else SchedulingConfig(),
        )
        self.kv = KVManager(
            n_blocks=self.config.n_blocks,
            block_size=BLOCK_SIZE,
            n_rows=n_rows,
            max_blocks_per_row=MODEL_LENGTH // BLOCK_SIZE,
            prefix_caching=self.config.scheduling.prefix_caching,
        )
        self._fill_cache(n_slots // BLOCK_SIZE)
        self.bucket_sizes = bucket_sizes(self.config.max_batch_tokens)
        self.timeline = Timeline(lambda: perf_counter_ns() * 1e-9, bucket_sizes=self.bucket_sizes)
        self.pool = RequestPool(
            max_waiting=self.config.max_queue,
            on_arrival=self.timeline.arrived,
            on_deliveries=lambda deliveries: None,
        )
        self.sizes = batch_sizes(
            EngineShape(
                block_size=BLOCK_SIZE,
                max_blocks=MODEL_LENGTH // BLOCK_SIZE,
                max_rows=n_rows,
                max_tokens=self.config.max_batch_tokens,
                n_rows=self.kv.n_rows,
                n_blocks=self.config.n_blocks,
                vocab_size=VOCAB_SIZE,
            )
        )
        self.workers = InstantWorkers(self.sizes)
        self.engine = EngineMaster(self.workers, self.kv, vocab_size=VOCAB_SIZE)
        self.scheduler = Scheduler(
            self.pool, self.engine, self.kv, config=self.config, timeline=self.timeline
        )
        drafting = SchedulingConfig(speculative="ngram", speculative_tokens=n_drafts or 1)
        self.speculation = configured_speculation(drafting, vocab_size=VOCAB_SIZE)
        # One request ends per iteration: the first ones have 1, 2, ... iterations to go.
        for i in range(n_rows // (1 + n_drafts)):
            self.arrive(n_output=(i + 1) * (1 + n_drafts))
        for _ in range(n_waiting):
            self.arrive(n_output=n_rows)

    def _fill_cache(self, n_blocks: int) -> None:
        """Put all blocks into the prefix cache, under hashes that no prompt has."""
        if self.kv.prefixes is None:
            return
        n_filled = 0
        while n_filled < n_blocks:
            n = min(n_blocks - n_filled, MODEL_LENGTH // BLOCK_SIZE)
            row = self.kv.reserve(n * BLOCK_SIZE)
            for block in self.kv.blocks_of(row).tolist():
                self.kv.prefixes.add(block, b"%d" % n_filled)
                n_filled += 1
            self.kv.release(row)

    def arrive(self, n_output: int) -> None:
        """Add a request with its own sampling parameters to the pool."""
        sampling = SamplingParams(max_tokens=n_output, temperature=0.8, top_p=0.95, top_k=40)
        name = f"request-{self.n_requests}"
        prompt_ids = tuple(range(self.n_requests, self.n_requests + N_INPUT))
        request = Request(name, prompt_ids, N_INPUT + n_output, sampling, seed=self.n_requests)
        if self.n_drafts:
            assert self.speculation is not None
            request.kind = Drafted(self.speculation)
        hash_prompt(request, self.kv)  # as the service does on the user's thread
        self.pool.add(request)
        self.n_requests += 1

    def step(self) -> int:
        """Run an iteration, then one arrival, which is not timed; returns nanoseconds."""
        start = perf_counter_ns()
        self.scheduler.step()
        elapsed = perf_counter_ns() - start
        self.arrive(n_output=self.n_rows)
        return elapsed

    def time_select(self) -> int:
        """Nanoseconds of the next iteration's select, which changes no state."""
        start = perf_counter_ns()
        choice = self.scheduler.policy.choose(self.pool.in_arrival_order(), self.scheduler.n_rsrv, ())
        elapsed = perf_counter_ns() - start
        assert self.n_drafts or len(choice.rows) == self.n_rows
        return elapsed

    def time_flat_batch(self) -> int:
        """Nanoseconds of building the last iteration's flat batch again."""
        message = self.workers.message
        assert message is not None and len(message.row) > 0.9 * self.n_rows
        start = perf_counter_ns()
        self.sizes.lay_out(message)
        return perf_counter_ns() - start


@dataclass(frozen=True, slots=True)
class Figures:
    """Microseconds of host work per iteration: median, 99th percentile, and the medians of its parts."""

    n_rows: int
    n_waiting: int
    n_cached_blocks: int | None
    n_drafts: int
    median_us: float
    p99_us: float
    parts_us: dict[str, float]


def measure(
    n_rows: int, n_waiting: int, n_cached_blocks: int | None, n_drafts: int, n_iterations: int
) -> Figures:
    """Measure the whole iteration first, uninstrumented; then its parts on a second engine, with timers."""
    serving = Serving(n_rows, n_waiting, n_cached_blocks, n_drafts)
    for _ in range(n_rows + WARM_UP):
        serving.step()
    whole = sorted(serving.step() / 1e3 for _ in range(n_iterations))
    return Figures(
        n_rows=n_rows,
        n_waiting=n_waiting,
        n_cached_blocks=n_cached_blocks,
        n_drafts=n_drafts,
        median_us=statistics.median(whole),
        p99_us=whole[int(0.99 * (len(whole) - 1))],
        parts_us=measure_parts(Serving(n_rows, n_waiting, n_cached_blocks, n_drafts), n_iterations),
    )


def measure_parts(serving: Serving, n_iterations: int) -> dict[str, float]:
    """Median microseconds of each part; `states and tokens` is the rest of the scheduler's step."""
    spent = dict.fromkeys(PARTS, 0)

    def timed(part: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            start = perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                spent[part] += perf_counter_ns() - start

        return call

    for part, methods in PARTS.items():
        for owner, name in methods:
            whose = getattr(serving, owner)
            setattr(whose, name, timed(part, getattr(whose, name)))
    for _ in range(serving.n_rows + WARM_UP):
        serving.step()
    samples: dict[str, list[float]] = {column: [] for column in COLUMNS}
    for _ in range(n_iterations):
        nanoseconds = {"select": serving.time_select()}
        spent.update(dict.fromkeys(spent, 0))
        whole = serving.step()
        nanoseconds |= spent
        nanoseconds["flat batch"] = serving.time_flat_batch()
        nanoseconds["states and tokens"] = whole - nanoseconds["select"] - sum(spent.values())
        nanoseconds["control message"] = nanoseconds["issue"] - nanoseconds["flat batch"]
        for column in COLUMNS:
            samples[column].append(nanoseconds[column] / 1e3)
    return {column: statistics.median(values) for column, values in samples.items()}


def main() -> None:
    """Measure every case; print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.host_work", description="The host's work of one iteration"
    )
    parser.add_argument("--iterations", type=int, default=300, help="measured iterations per case")
    n_iterations = parser.parse_args().iterations
    progress = Console(stderr=True)
    figures = [
        measure(*case, n_iterations) for case in track(CASES, "host work of an iteration", console=progress)
    ]
    table = Table(title=f"Host work of one iteration, microseconds (target: {AIM_US:g} at 256 rows)")
    for heading in ("rows", "waiting", "cached", "drafts", "median", "p99", "per row", *COLUMNS):
        table.add_column(heading, justify="right")
    for f in figures:
        numbers = [f.median_us, f.p99_us, f.median_us / f.n_rows, *f.parts_us.values()]
        table.add_row(
            f"{f.n_rows:,}",
            f"{f.n_waiting:,}",
            "" if f.n_cached_blocks is None else f"{f.n_cached_blocks:,}",
            str(f.n_drafts or ""),
            *(f"{n:.3g}" if n < 10 else f"{n:.0f}" for n in numbers),
        )
    Console(width=140).print(table)
    cases = [
        {
            "rows": f.n_rows,
            "waiting": f.n_waiting,
            "cached_blocks": f.n_cached_blocks,
            "drafts": f.n_drafts,
            "median_us": round(f.median_us, 1),
            "p99_us": round(f.p99_us, 1),
            "parts_us": {name: round(us, 1) for name, us in f.parts_us.items()},
        }
        for f in figures
    ]
    worst = max(f.median_us for f in figures if f.n_rows == 256 and not f.n_drafts)
    with_drafts = next(f for f in figures if f.n_drafts)
    without = next(
        f
        for f in figures
        if (f.n_rows, f.n_waiting, f.n_cached_blocks, f.n_drafts) == (*_sizes(with_drafts), 0)
    )
    ratio = with_drafts.median_us / without.median_us
    print(f"with drafts {ratio:.2f} times the work without (target: at most {AIM_WITH_DRAFTS:g})")
    met = worst <= AIM_US and ratio <= AIM_WITH_DRAFTS
    found = {"aim_us": AIM_US, "with_drafts": round(ratio, 2), "met": met, "cases": cases}
    print(json.dumps({"benchmark": "host_work", **found}))


def _sizes(figures: Figures) -> tuple[int, int, int | None]:
    return figures.n_rows, figures.n_waiting, figures.n_cached_blocks


if __name__ == "__main__":
    main()
