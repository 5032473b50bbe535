"""Plays a workload on a simulated cluster: the real scheduler, or the baseline, on a simulated engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.paper.request_level import RequestLevelScheduler
from bench.simulate.cluster import Cluster
from bench.simulate.figures import Served, StreamedFigures
from bench.simulate.places import Partition, Places
from bench.simulate.workload import Workload
from orca_jax.config import ParallelConfig, ServingConfig, Sizes
from orca_jax.planning.plan import Plan, PlanTarget, make_plan
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.timeline import Timeline
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock
from orca_jax.simulation.simulation import Simulation, arrive, steps

KEPT = 16  # records of a timeline, enough for what is in flight
BLOCK_SIZE = 16


class DoesNotFit(Exception):
    """A configuration does not fit on the cluster; the message says what does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """The system that serves: ORCA with `max_bs`, or with `mbs` the baseline (max_bs, mbs).

    If `n_slots` is None it follows from the devices' memory. Attention is counted as a kernel's, which stores
    no scores (ORCA 5), whatever XLA would need there.
    """

    partition: Partition
    cluster: Cluster
    max_bs: int
    mbs: int | None = None
    overlap: bool = False
    n_slots: int | None = None

    @property
    def label(self) -> str:
        """The label, as in the paper's Figure 10."""
        return f"orca({self.max_bs})" if self.mbs is None else f"ft({self.max_bs}, {self.mbs})"

    def serving(self) -> ServingConfig:
        """Sizes as chosen by `orca plan` and an engine. Raises DoesNotFit."""
        plan = self.plan()
        if not plan.fits:
            problems = "; ".join(stage.problem for stage in plan.stages if stage.problem)
            raise DoesNotFit(f"{self.label}: {problems}")
        whole = self.partition.model.n_positions
        if self.mbs is not None and plan.serving.n_slots < self.max_bs * whole:
            needed, slots = self.max_bs * whole, plan.serving.n_slots
            raise DoesNotFit(f"{self.label}: {slots} slots fit, and {needed} would be reserved")
        return plan.serving

    def plan(self) -> Plan:
        """The plan for the partition, by formula."""
        device = replace(self.cluster.device, attention="kernel")
        return make_plan(
            PlanTarget(
                config=self.partition.model,
                device=device,
                sizes=Sizes(
                    max_batch_size=self.max_bs,
                    n_slots=self.n_slots,
                    block_size=BLOCK_SIZE,
                    overlap=self.overlap,
                    policy="orca",
                ),
                dtype=self.partition.dtype,
                context=1,
                parallel=ParallelConfig(
                    pipeline_parallel=self.partition.n_stages, tensor_parallel=self.partition.n_devices
                ),
            )
        )

    def places(self) -> Places:
        """The places: the baseline's stages wait for control messages; ORCA's do not (ORCA 4.1)."""
        return Places(self.partition, replace(self.cluster, control_messages=self.mbs is not None))


def serve(system: System, workload: Workload, *, rate: float) -> Served:
    """Play the whole workload and return its results. Raises DoesNotFit."""
    figures = play(system, workload)
    return figures.served(rate=rate, first_arrival=float(workload.arrivals[0]))


def play(system: System, workload: Workload) -> StreamedFigures:
    """Play the whole workload, to its last end. Raises DoesNotFit."""
    figures = StreamedFigures()
    if system.mbs is None:
        _play_orca(system, workload, figures)
    else:
        _play_baseline(system, system.mbs, workload, figures)
    assert len(figures.ends) == len(workload), "a request did not end"
    return figures


def _play_orca(system: System, workload: Workload, figures: StreamedFigures) -> None:
    simulation = Simulation(
        system.serving(),
        n_workers=system.partition.n_stages,
        places=system.places(),
        token=None,
        max_records=KEPT,
    )
    simulation.timeline.observers = (figures,)
    simulation.add_each(workload.requests())
    simulation.run()
    assert not simulation.refused, simulation.refused[0]


def _play_baseline(system: System, mbs: int, workload: Workload, figures: StreamedFigures) -> None:
    serving, clock = system.serving(), VirtualClock()
    timeline = Timeline(clock.now, max_records=KEPT)
    timeline.observers = (figures,)
    pool = RequestPool(max_waiting=serving.max_queue, on_arrival=timeline.arrived, on_deliveries=_not_kept)
    n_workers = system.partition.n_stages
    engine = SimulatedEngine(clock, n_workers=n_workers, places=system.places(), token=None)
    longest = system.partition.model.n_positions
    kv = KVManager(
        n_blocks=serving.n_blocks,
        block_size=serving.block_size,
        n_rows=system.max_bs,
        max_blocks_per_row=-(-longest // serving.block_size),
    )
    scheduler = RequestLevelScheduler(
        pool, engine, kv, max_bs=system.max_bs, mbs=mbs, max_length=longest, timeline=timeline
    )
    arrive(clock, workload.requests(), pool.add)
    for _ in steps(clock, scheduler):
        pass


def _not_kept(_: Sequence[Delivery]) -> None:
    pass
