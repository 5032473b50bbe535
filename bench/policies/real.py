# pyright: standard
"""The machine that a trace is played on in real time: GPT-2's size, random weights, this machine's device."""

import sys
from dataclasses import replace

from bench.device.bare_engine import BareEngine
from bench.policies.figures import Figures
from bench.policies.limits import Limits
from bench.policies.play import RealClock, play
from bench.policies.policies import BASELINE, sizes_of
from bench.policies.simulated import make_scheduler
from bench.policies.traces import Trace
from orca_jax.config import ServingConfig, Sizes
from orca_jax.engine.engine_master import EngineMaster
from orca_jax.families.presets import PRESETS
from orca_jax.planning.sizes import n_rows
from orca_jax.scheduling.kv_manager import KVManager

MAX_BATCH_SIZE = 16


class RealMachine:
    """One engine, compiled ahead, for all plays; each has its own scheduler, blocks and prefix cache."""

    def __init__(self, preset: str = "gpt2", max_batch_size: int = MAX_BATCH_SIZE) -> None:
        self.model = PRESETS[preset]
        self._bare = BareEngine(
            self.model, Sizes(max_batch_size=max_batch_size), compile_ahead=True, on_program=_compiled
        )

    def serving(self, policy: str, limits: Limits) -> ServingConfig:
        """The compiled engine's sizes with the policy's switches."""
        built = self._bare.serving
        scheduling = sizes_of(policy).scheduling
        if scheduling.chunked_prefill:
            scheduling = replace(scheduling, prefill_tokens=built.scheduling.prefill_tokens)
        n_slots = built.n_slots if limits.n_slots is None else min(limits.n_slots, built.n_slots)
        return replace(built, n_slots=n_slots, scheduling=scheduling)

    def play(self, policy: str, limits: Limits, trace: Trace) -> Figures:
        """Play the trace in real time."""
        serving = self.serving(policy, limits)
        kv = KVManager(
            n_blocks=serving.n_blocks,
            block_size=serving.block_size,
            n_rows=n_rows(serving.max_batch_size, n_workers=1),
            max_blocks_per_row=-(-self.model.n_positions // serving.block_size),
            prefix_caching=serving.scheduling.prefix_caching,
        )
        return play(
            trace,
            lambda pool, engine, timeline: make_scheduler(
                policy, serving, limits, pool, engine, kv, timeline
            ),
            clock=RealClock(),
            engine=EngineMaster(self._bare.workers, kv, vocab_size=self.model.vocab_size),
            kv=kv,
            scheduling=serving.scheduling,
            declares_limits=policy != BASELINE,
            vocabulary=self.model.vocab_size,
        )


def _compiled(n: int, of: int, name: str) -> None:
    print(f"compiled {n} of {of}: {name}", file=sys.stderr, flush=True)
