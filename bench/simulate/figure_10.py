"""The paper's Figure 10, simulated: with no constant fitted, and with one.

The constant is a factor on all device times, the same for all models, chosen so that the engine's own
normalized execution time for 175B is the paper's 95 ms: half of "190ms ..., which is a double of the
normalized execution time (by the number of generated tokens) of orca(128) shown in Figure 9c". Figure 9c
shows batches of equal requests, 128 tokens in and 32 out; the paper does not say which batch size is meant.
It is taken to be 32, the largest of the figure, for two reasons. NVIDIA's own figures for FasterTransformer,
whose curves are close to ORCA's in Figure 9, are 1,547 ms for 32 requests of 128 tokens in and 8 out, 1,037
ms for 16, and for one of 512 in and 32 out 1,720 ms, 54 per token (175B on eight A100, docs/gpt_guide.md of
github.com/NVIDIA/FasterTransformer): with 24 more tokens at that pace, 89 ms per token for 32 and 73 for 16.
And if 95 ms were the time of a single request, then (1, 1), one of the baseline's two best options in 6.2,
could not reach the baseline's 0.185 requests per second, of 64.5 tokens each.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from bench.paper.serving_curve import best_of
from bench.simulate.cluster import Cluster
from bench.simulate.figures import Served
from bench.simulate.load import curve, load_of, peak
from bench.simulate.places import Partition, Places
from bench.simulate.serving import DoesNotFit, System
from orca_jax.families.presets import PRESETS
from orca_jax.planning.cost_model import IterationShape

FIT_PRESET, FIT_SECONDS, FIT_BATCH = "gpt3-175b", 0.095, 32
OWN_INPUT, OWN_OUTPUT = 128, 32  # Figure 9's "orca(128)"
TIMES_OWN = 2.0  # throughputs are compared at this multiple of the engine's own latency
ORCA_MAX_BS = (8, 16, 32, 64, 128)
BASELINE_MAX_BS = (1, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A model of Table 1, its partitions, and its results in section 6.2."""

    preset: str
    n_stages: int
    n_devices: int
    paper: Mapping[str, float]

    @property
    def partition(self) -> Partition:
        """The partition in float16 (ORCA 6)."""
        return Partition(model=PRESETS[self.preset], n_stages=self.n_stages, n_devices=self.n_devices)


FIGURES = {
    "10a": Figure(preset="gpt3-101b", n_stages=1, n_devices=8, paper={"baseline_peak_req_s": 0.49}),
    "10b": Figure(
        preset="gpt3-175b",
        n_stages=2,
        n_devices=8,
        paper={"normalized_latency_ms": 190, "orca_req_s": 6.81, "baseline_req_s": 0.185, "ratio": 36.9},
    ),
    "10c": Figure(preset="gpt3-341b", n_stages=4, n_devices=8, paper={}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One set of assumptions: the factor on device times, the latency to compare at, and all curves by label.

    `own` is the engine's own normalized execution time, in seconds. `missing` says what did not fit.
    """

    slowness: float
    own: float
    latency: float
    curves: Mapping[str, Sequence[Served]]
    missing: Sequence[str] = ()

    def best(self, kind: str) -> tuple[str, float] | None:
        """Among systems whose label begins with `kind`, the one with the most requests per second at the
        latency.
        """
        those = {label: points for label, points in self.curves.items() if label.startswith(kind)}
        return best_of(those, self.latency)

    def peak(self, kind: str) -> float:
        """The most requests per second of such a system, at any latency."""
        return max(peak(points) for label, points in self.curves.items() if label.startswith(kind))

    def record(self) -> dict[str, Any]:
        """The fields for the last line."""
        orca, baseline = self.best("orca"), self.best("ft")
        assert orca is not None and baseline is not None, "the lowest load is below that latency"
        return {
            "slowness": round(self.slowness, 4),
            "own_ms": round(self.own * 1e3, 2),
            "normalized_latency_ms": round(self.latency * 1e3, 2),
            "orca": orca[0],
            "orca_req_s": round(orca[1], 4),
            "baseline": baseline[0],
            "baseline_req_s": round(baseline[1], 4),
            "ratio": round(orca[1] / baseline[1], 2),
            "orca_peak_req_s": round(self.peak("orca"), 4),
            "baseline_peak_req_s": round(self.peak("ft"), 4),
        }


def own_seconds(partition: Partition, cluster: Cluster, batch_size: int = FIT_BATCH) -> float:
    """The engine's own normalized execution time: equal requests, no scheduler, no pipelining (Figure 9)."""
    places = Places(partition, cluster)
    seconds = 0.0
    for i in range(OWN_OUTPUT):
        n_input = 1 if i else OWN_INPUT
        shape = IterationShape([n_input] * batch_size, [OWN_INPUT + i] * batch_size)
        seconds += sum(places(shape.sums()))
    return seconds / OWN_OUTPUT


def fitted_slowness(batch_size: int = FIT_BATCH) -> float:
    """The factor with which 175B's own time is the paper's."""
    figure = next(figure for figure in FIGURES.values() if figure.preset == FIT_PRESET)
    return FIT_SECONDS / own_seconds(figure.partition, Cluster(), batch_size)


def systems(figure: Figure, cluster: Cluster, *, overlap: bool) -> list[System]:
    """ORCA by `max_bs`, and the baseline by (max_bs, mbs), with at most as many microbatches as stages."""
    all_systems = [
        System(partition=figure.partition, cluster=cluster, max_bs=max_bs, overlap=overlap)
        for max_bs in ORCA_MAX_BS
    ]
    for max_bs in BASELINE_MAX_BS:
        mbs = max_bs
        while mbs >= max(1, max_bs / figure.n_stages):
            all_systems.append(System(partition=figure.partition, cluster=cluster, max_bs=max_bs, mbs=mbs))
            mbs //= 2
    return all_systems


def curves(
    figure: Figure,
    *,
    fit_batch: int,
    overlap: bool,
    n_processes: int,
    on_curve: Callable[[int, int], object],
) -> Variant:
    """The variant with nothing fitted; `on_curve` gets the number of finished curves and the total."""
    cluster = Cluster()
    own = own_seconds(figure.partition, cluster, fit_batch)
    latency = TIMES_OWN * own
    points: dict[str, list[Served]] = {}
    missing: list[str] = []
    with ProcessPoolExecutor(n_processes, mp_context=get_context("spawn")) as pool:
        tasks: dict[Future[list[Served]], str] = {}
        for system in systems(figure, cluster, overlap=overlap):
            try:
                system.serving()
            except DoesNotFit as error:
                missing.append(str(error))
                continue
            tasks[pool.submit(curve, system, latency, load_of(system))] = system.label
        for n_done, task in enumerate(as_completed(tasks), 1):
            points[tasks[task]] = task.result()
            on_curve(n_done, len(tasks))
    ordered = {label: points[label] for label in tasks.values()}
    return Variant(slowness=1.0, own=own, latency=latency, curves=ordered, missing=missing)


def slower(variant: Variant, times: float) -> Variant:
    """Multiply all device times by `times`.

    Nothing else takes time in the simulation, so the result is the same with a slower clock: latencies are
    multiplied by `times`, loads divided by it. This is why no factor changes the ratio.
    """
    return replace(
        variant,
        slowness=variant.slowness * times,
        own=variant.own * times,
        latency=variant.latency * times,
        curves={label: [point.slower(times) for point in points] for label, points in variant.curves.items()},
    )


def result(name: str, fitted: Variant | None, unfitted: Variant) -> dict[str, Any]:
    """The last line: the fitted variant with the other one inside, or only the unfitted one."""
    shown = fitted or unfitted
    fields = {"bench": "simulate", "figure": name, "fitted": fitted is not None, **shown.record()}
    if fitted is not None:
        fields["unfitted"] = unfitted.record()
    return fields | {"paper": dict(FIGURES[name].paper)}
