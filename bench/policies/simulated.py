"""The machine that a trace is simulated on: one device of the cost model, with the sizes of `orca plan`."""

from dataclasses import dataclass, field, replace

from bench.paper.request_level import RequestLevelScheduler
from bench.policies.figures import Figures
from bench.policies.limits import Limits
from bench.policies.play import play
from bench.policies.policies import BASELINE, sizes_of
from bench.policies.traces import Trace
from bench.simulate.cluster import Cluster
from bench.simulate.places import Partition, Places
from orca_jax.config import Dtype, ServingConfig, Sizes
from orca_jax.families.model_config import ModelConfig
from orca_jax.planning.known_devices import KnownDevice
from orca_jax.planning.plan import PlanTarget, make_plan
from orca_jax.planning.sizes import n_rows
from orca_jax.scheduling.engine_protocol import Engine
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.simulation.checked_policy import watch
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock, hashed_token
from orca_jax.simulation.simulation import Steps


@dataclass(slots=True)
class SimulatedMachine:
    """One device that runs the whole model; times are the cost model's floors, plus gaps between kernels."""

    model: ModelConfig
    device: KnownDevice
    dtype: Dtype = "bfloat16"
    _places: dict[int, Places] = field(default_factory=dict[int, Places])

    def serving(self, policy: str, limits: Limits) -> ServingConfig:
        """The sizes that `orca serve` would choose."""
        asked: Sizes = replace(sizes_of(policy), max_batch_size=limits.max_batch_size, n_slots=limits.n_slots)
        target = PlanTarget(
            config=self._limited(limits),
            device=self.device,
            sizes=asked,
            dtype=self.dtype,
            context=min(512, limits.n_positions),
        )
        return make_plan(target).serving

    def play(self, policy: str, limits: Limits, trace: Trace) -> Figures:
        """Play the trace on a new engine."""
        serving = self.serving(policy, limits)
        places = self._places.get(limits.n_positions)
        if places is None:
            partition = Partition(model=self._limited(limits), n_stages=1, n_devices=1, dtype=self.dtype)
            places = self._places[limits.n_positions] = Places(partition, Cluster(device=self.device))
        clock = VirtualClock()
        kv = KVManager(
            n_blocks=serving.n_blocks,
            block_size=serving.block_size,
            n_rows=n_rows(serving.max_batch_size, n_workers=1),
            max_blocks_per_row=-(-limits.n_positions // serving.block_size),
            prefix_caching=serving.scheduling.prefix_caching,
        )

        def watched(pool: RequestPool, engine: Engine, timeline: Timeline) -> Steps:
            made = make_scheduler(policy, serving, limits, pool, engine, kv, timeline)
            if isinstance(made, Scheduler):
                watch(made)
            return made

        return play(
            trace,
            watched,
            clock=clock,
            engine=SimulatedEngine(clock, places=places, token=hashed_token),
            kv=kv,
            scheduling=serving.scheduling,
            declares_limits=policy != BASELINE,
        )

    def _limited(self, limits: Limits) -> ModelConfig:
        return replace(self.model, n_positions=limits.n_positions)


def make_scheduler(
    policy: str,
    serving: ServingConfig,
    limits: Limits,
    pool: RequestPool,
    engine: Engine,
    kv: KVManager,
    timeline: Timeline,
) -> Steps:
    """The policy's scheduler; the baseline reserves slots for the longest request, as in the paper (6.1)."""
    if policy == BASELINE:
        return RequestLevelScheduler(
            pool,
            engine,
            kv,
            max_bs=serving.max_batch_size,
            mbs=serving.max_batch_size,
            max_length=limits.n_positions,
            timeline=timeline,
        )
    return Scheduler(pool, engine, kv, config=serving, timeline=timeline)
