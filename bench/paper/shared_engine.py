"""One compiled engine with random weights for schedulers of every kind and size, one after the other.

Systems therefore differ only in their scheduling: weights, programs, buckets and slots are the same.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from rich.progress import Progress

from bench.device.bare_engine import BareEngine
from bench.paper.play import MakeScheduler
from bench.paper.request_level import RequestLevelScheduler
from orca_jax.config import Dtype, Sizes
from orca_jax.families.presets import PRESETS
from orca_jax.request.request import Request
from orca_jax.scheduling.admission import admissible
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline


class SharedEngine:
    """An engine of a preset on the first devices that JAX has; every program is compiled when it is made.

    `most_bs` is the largest batch of any scheduler, `most_tokens` the maximum of tokens in an iteration (at
    least the model's length), from which `buckets` follow unless passed. `n_slots` defaults to the choice of
    an engine of `most_bs`. Raises ConfigError.
    """

    def __init__(
        self,
        preset: str,
        *,
        dtype: Dtype | None = None,
        most_bs: int,
        most_tokens: int = 0,
        buckets: tuple[int, ...] | None = None,
        n_slots: int | None = None,
        pipeline_parallel: int = 1,
        seed: int = 0,
        on_program: Callable[[int, int, str], object] | None = None,
    ) -> None:
        self.model = PRESETS[preset]
        bare = BareEngine(
            self.model,
            Sizes(
                max_batch_size=most_bs,
                n_slots=n_slots,
                max_batch_tokens=max(most_tokens, most_bs, self.model.n_positions),
                policy="orca",
            ),
            dtype=dtype,
            seed=seed,
            pipeline_parallel=pipeline_parallel,
            buckets=buckets,
            compile_ahead=True,
            on_program=on_program,
        )
        self.dtype, self.device, self.n_stages = bare.dtype, bare.device, bare.n_stages
        self.serving, self.buckets, self.kv, self.engine = bare.serving, bare.buckets, bare.kv, bare.engine

    def orca(self, max_bs: int, *, overlap: bool = True) -> MakeScheduler:
        """A scheduler of Algorithm 1 with this `max_bs`."""
        config = replace(self.serving, max_batch_size=max_bs, overlap=overlap)

        def make(pool: RequestPool, timeline: Timeline) -> Scheduler:
            return Scheduler(pool, self.engine, self.kv, config=config, timeline=timeline)

        return make

    def baseline(self, max_bs: int, mbs: int) -> MakeScheduler:
        """The baseline's scheduler: batches of `max_bs` requests in microbatches of `mbs`."""

        def make(pool: RequestPool, timeline: Timeline) -> RequestLevelScheduler:
            return RequestLevelScheduler(
                pool,
                self.engine,
                self.kv,
                max_bs=max_bs,
                mbs=mbs,
                max_length=self.model.n_positions,
                timeline=timeline,
            )

        return make

    @property
    def check(self) -> Callable[[Request], None]:
        """Raises InvalidRequest for a request that the engine cannot take."""
        return partial(admissible, config=self.serving, model=self.model)

    def facts(self) -> dict[str, Any]:
        """The settings that the figures depend on."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "pipeline_parallel": self.n_stages,
            "n_slots": self.serving.n_slots,
            "max_batch_tokens": self.serving.max_batch_tokens,
            "jax": jax.__version__,
        }


def add_engine_flags(parser: argparse.ArgumentParser, *, preset: str) -> None:
    """Add the flags of a SharedEngine: --preset, --dtype, --n-slots, --pipeline-parallel, --seed."""
    parser.add_argument("--preset", choices=sorted(PRESETS), help=f"default: {preset}; weights are random")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU, bfloat16 else"
    )
    parser.add_argument("--n-slots", type=int, help="tokens of keys and values (default: what fits)")
    parser.add_argument(
        "--pipeline-parallel", type=int, default=1, help="inter-layer partitions (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of traces and weights (default: 0)")


def compiling(progress: Progress) -> Callable[[int, int, str], None]:
    """A progress bar for the programs that a SharedEngine compiles."""
    task = progress.add_task("weights", total=None)

    def show(done: int, total: int, name: str) -> None:
        progress.update(task, description=f"compiling: {name}", completed=done, total=total)

    return show
