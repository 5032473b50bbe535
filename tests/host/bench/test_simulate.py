"""The simulated evaluation: times worked by hand, and figures that follow from counting requests."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.paper.serving_curve import throughput_at
from bench.simulate import figure_10
from bench.simulate.cluster import MESSAGE_BASE, MESSAGE_BETWEEN, RING_STEP_BETWEEN, US, Cluster
from bench.simulate.figures import StreamedFigures, served
from bench.simulate.load import Load, curve
from bench.simulate.places import Partition, Places
from bench.simulate.replicas import shares
from bench.simulate.serving import DoesNotFit, System, play, serve
from bench.simulate.workload import Tails, Workload, paper_workload
from orca_jax.families.presets import PRESETS
from orca_jax.planning.cost_model import IterationShape, IterationSums
from orca_jax.planning.known_devices import GPUS, KnownDevice
from orca_jax.request.request import Request, Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.simulation.engine import batch_sums
from orca_jax.simulation.simulation import Simulation
from server.load.trace import paper_trace
from tests.gpt_config import gpt_config

SMALL = gpt_config(vocab_size=10, n_positions=2048, hidden_size=4, n_layers=3, n_heads=2, ffn_size=16)
# 2 bytes a second and as many operations as one likes: a second for each element of two bytes that moves.
SLOW = KnownDevice(
    name="slow",
    memory=1 << 30,
    bandwidth=2.0,
    matrix_rates={"float16": 1e9},
    inside=4.0,
    between=1.0,
    host_link=1.0,
    per_machine=2,
    attention="kernel",
)
A100 = Partition(model=PRESETS["gpt3-175b"], n_stages=2, n_devices=8)


def small_system(max_bs: int, mbs: int | None = None, *, n_stages: int = 1) -> System:
    """A small system: slower than an A100 by about as much as its model is smaller."""
    device = replace(GPUS["a100-40gb"], bandwidth=1e5, matrix_rates={"float16": 1e7})
    partition = Partition(model=SMALL, n_stages=n_stages, n_devices=1)
    return System(partition=partition, cluster=Cluster(device=device), max_bs=max_bs, mbs=mbs, n_slots=40_960)


# Places.


def test_a_stage_s_seconds_worked_by_hand():
    """One increment with 3 tokens in the cache and one initiation of 2: T = 3, R = 2; bound by bytes.

    From the attention of the last layer on there are R tokens.
    """
    places = Places(Partition(model=SMALL, n_stages=1, n_devices=1), Cluster(device=SLOW))
    sums = IterationShape([1, 2], [3, 2]).sums()
    assert sums == IterationSums(n_rows=2, n_tokens=3, n_keys=5, n_seen=3 + 1 + 2)
    qkv = 4 * 12 + 12 + 3 * (4 + 12)

    def after_qkv(n_tokens: int) -> int:
        attention = 2 * 4 * (3 + 5) + 2 * n_tokens * 4  # keys, values written, read; queries in, results out
        out = 4 * 4 + 4 + n_tokens * (4 + 4)
        up_and_down = 2 * (4 * 16 + n_tokens * (4 + 16)) + 16 + 4
        return attention + out + up_and_down

    embed = 3 * (4 + 4 + 4)
    head = 10 * 4 + 2 * 4 + 2 * 2 * 10  # logits and what the sampler reads of them are of 4 bytes
    sampler = 2 * 2 * 10
    elements = embed + 3 * qkv + 2 * after_qkv(3) + after_qkv(2) + head + sampler
    kernels = 3 * 8 + 1 + 3
    (seconds,) = places(sums)
    assert seconds == pytest.approx(elements + kernels * 0.9e-6, rel=1e-12)


def test_unequal_stages_and_the_link_between_them():
    """Layers 1 and 2 with the embedding, layer 3 with the head; two devices each, a machine each."""
    partition = Partition(model=SMALL, n_stages=2, n_devices=2)
    cluster = Cluster(device=SLOW)
    sums = IterationShape([1], [1]).sums()
    first, link, second = Places(partition, cluster)(sums)
    layer = (4 * 6 + 6 + 10) + (2 * 2 * 2 + 2 * 2) + (2 * 4 + 4 + 6) + 2 * (4 * 8 + 12) + 8 + 4
    sent = 2 * 4 / 2 * 2  # of an all-reduce of 4 elements of 2 bytes: 2 (n - 1) / n of them, 2 layers or sums
    assert first == pytest.approx(
        12 + 2 * layer + 5 * (sent / 4) + 5 * 10e-6 + (2 * 8 + 1) * 0.9e-6, rel=1e-12
    )
    head, logits = 5 * 4 + 4 + 2 * 5, 2 * 10 / 2  # half of the vocabulary; all logits put side by side
    assert second == pytest.approx(
        layer + head + 2 * 10 + 2 * (sent / 4) + logits / 4 + 3 * 10e-6 + (8 + 3) * 0.9e-6, rel=1e-12
    )
    assert link == pytest.approx(4 * 2 / 1.0 + 18e-6, rel=1e-12)  # 4 elements of 2 bytes, a byte a second
    assert pytest.approx(18e-6) == MESSAGE_BASE + MESSAGE_BETWEEN


def test_control_messages_make_every_stage_but_the_first_wait():
    partition = Partition(model=SMALL, n_stages=3, n_devices=2)
    sums = IterationShape([1], [1]).sums()
    plain = Places(partition, Cluster(device=SLOW))(sums)
    cost = Places(partition, Cluster(device=SLOW, control_messages=True))(sums)
    waited = [after - before for before, after in zip(plain, cost, strict=True)]
    assert waited == pytest.approx([0, 0, 18e-6, 0, 18e-6], abs=1e-12)


def test_the_factor_multiplies_every_time():
    sums = IterationShape([1, 7], [30, 7]).sums()
    once = Places(A100, Cluster(control_messages=True))(sums)
    twice = Places(A100, Cluster(control_messages=True, slowness=2.0))(sums)
    assert twice == pytest.approx([2 * seconds for seconds in once])


def test_a_ring_over_machines_has_its_slow_steps_where_it_leaves_one():
    cluster = Cluster()
    assert cluster.ring_latency(1) == 0.0
    assert cluster.ring_latency(8) == 33.7 * US
    assert cluster.ring_latency(16) == pytest.approx(33.7 * US / 14 * 28 + 2 * RING_STEP_BETWEEN)
    assert (cluster.ring_rate(8), cluster.ring_rate(16)) == (300e9, 25e9)
    assert [cluster.hop_rate(stage, 4) for stage in (1, 2, 3)] == [300e9, 25e9, 300e9]


ROW = st.tuples(st.integers(1, 700), st.integers(0, 700))


@given(
    rows=st.lists(ROW, min_size=1, max_size=40),
    split=st.sampled_from([(1, 1), (1, 8), (2, 8), (4, 4), (3, 2), (96, 1)]),
    slowness=st.sampled_from([1.0, 1.61]),
)
@settings(max_examples=60, deadline=None)
def test_the_quick_time_is_the_cost_model_s_floor_to_the_last_bit(rows, split, slowness):
    partition = Partition(model=PRESETS["gpt3-175b"], n_stages=split[0], n_devices=split[1])
    places = Places(partition, Cluster(slowness=slowness))
    sums = IterationShape([q for q, _ in rows], [q + more for q, more in rows]).sums()
    assert places(sums) == places.plain(sums)


@given(st.lists(st.tuples(st.integers(0, 50), st.one_of(st.just(1), st.integers(1, 50))), min_size=1))
def test_sums_of_a_batch_are_those_of_its_lengths(rows):
    """Rows are whole prompts, chunks of prompts, and single tokens."""
    batch: list[Row] = []
    for n_computed, n_tokens in rows:
        request = Request("A", (0,) * 100, 149, SamplingParams(max_tokens=49), seed=0)
        request.n_computed = n_computed
        batch.append((request, n_tokens))
    shape = IterationShape([n for _, n in rows], [computed + n for computed, n in rows])
    assert batch_sums(batch) == shape.sums()


# Requests.


def test_the_paper_s_workload_is_the_paper_s_trace_without_its_tokens():
    trace = paper_trace(300, vocab_size=50, seed=5, rate=3.0)
    workload = paper_workload(300, rate=3.0, seed=5)
    assert workload.n_inputs.tolist() == [len(request.prompt_ids) for request in trace]
    assert workload.n_outputs.tolist() == [request.n_output for request in trace]
    assert workload.arrivals.tolist() == [request.arrival for request in trace]


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.5])
def test_tails_are_longer_at_equal_means(sigma: float):
    workload = Tails(sigma)(200_000, rate=1.0)
    assert workload.n_inputs.mean() == pytest.approx(272, rel=0.02)
    assert workload.n_outputs.mean() == pytest.approx(64.5, rel=0.02)
    assert workload.n_inputs.min() >= 1 and workload.n_outputs.min() >= 1
    assert (workload.n_inputs + workload.n_outputs).max() <= 2048
    assert (workload.n_outputs.max() > 128) == (sigma > 0)


@given(st.integers(1, 300), st.integers(1, 20), st.sampled_from(["random", "in turn"]))
@settings(max_examples=30, deadline=None)
def test_every_request_goes_to_one_replica_and_in_its_order(n, n_replicas, dispatch):
    workload = paper_workload(n, rate=10.0)
    parts = shares(workload, n_replicas, dispatch, seed=3)
    assert len(parts) == n_replicas
    together = np.concatenate([part.arrivals for part in parts])
    assert sorted(together.tolist()) == workload.arrivals.tolist()
    for part in parts:
        assert (np.diff(part.arrivals) >= 0).all()
    if dispatch == "in turn":
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


# Figures.


def test_streamed_figures_are_those_of_all_records():
    system = small_system(4, n_stages=2)
    workload = paper_workload(80, rate=20.0)
    streamed = play(system, workload)
    whole = Simulation(system.serving(), n_workers=2, places=system.places(), token=None)
    for arrival, request in workload.requests():
        whole.add_at(arrival, request)
    timeline = whole.run()
    assert streamed.normalized.tolist() == [request.normalized_latency for request in timeline.requests]
    assert streamed.ends.tolist() == [request.finished for request in timeline.requests]
    assert (
        streamed.n_tokens
        == sum(request.n_output for request in timeline.requests)
        == workload.n_outputs.sum()
    )
    assert streamed.n_iterations == len(timeline.iterations)
    assert streamed.n_rows == sum(iteration.n_rows for iteration in timeline.iterations)


def test_throughput_counts_the_ends_between_the_first_and_the_last_tenth():
    figures = StreamedFigures()
    for i, end in enumerate([10.0, 11.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 71.0, 300.0]):
        figures.ends.append(end)
        figures.normalized.append(float(i))
    figures.n_tokens, figures.n_iterations, figures.n_rows = 580, 4, 10
    result = figures.served(rate=1.0, first_arrival=10.0)
    assert result.req_s == pytest.approx(7 / 60)  # from that at 11 to that at 71
    assert (result.n_requests, result.seconds, result.mean_batch) == (10, 290.0, 2.5)
    assert (result.normalized_median, result.tokens_s) == (4.5, 2.0)
    half = served([figures], rate=1.0, first_arrival=10.0, scale=2.0)
    assert (half.req_s, half.normalized_median) == (2 * result.req_s, result.normalized_median)


def test_one_batch_alone_has_a_throughput_too():
    figures = StreamedFigures()
    for _ in range(3):
        figures.ends.append(8.0)
        figures.normalized.append(1.0)
    figures.n_iterations = 1
    assert figures.served(rate=1.0, first_arrival=2.0).req_s == 0.5


@pytest.mark.parametrize("mbs", [None, 1, 2, 4])
def test_what_comes_in_goes_out_and_little_s_law_holds(mbs: int | None):
    """Live requests, summed over time, are the requests' latencies summed: L = rate x W."""
    system = small_system(4, mbs, n_stages=2)
    workload = paper_workload(60, rate=5.0)
    figures = play(system, workload)
    assert figures.n_tokens == workload.n_outputs.sum()
    ends, arrivals = np.sort(np.asarray(figures.ends)), workload.arrivals
    moments = np.sort(np.concatenate([ends, arrivals]))
    live = np.searchsorted(arrivals, moments[:-1], "right") - np.searchsorted(ends, moments[:-1], "right")
    assert live.min() >= 0
    assert (live * np.diff(moments)).sum() == pytest.approx(ends.sum() - arrivals.sum())


def test_orca_returns_more_at_every_load_that_makes_requests_meet():
    for rate in (1.0, 5.0, 20.0):
        orca, baseline = (
            serve(small_system(4, mbs), paper_workload(80, rate=rate), rate=rate) for mbs in (None, 4)
        )
        assert orca.normalized_median < baseline.normalized_median


def test_one_request_at_a_time_costs_the_same_under_both():
    """Batches of one request that never meet: request-level and iteration-level scheduling are one."""
    workload = paper_workload(5, rate=1.0)
    apart = Workload(workload.n_inputs, workload.n_outputs, np.arange(5.0) * 1e4)
    orca, baseline = (play(small_system(1, mbs), apart) for mbs in (None, 1))
    assert baseline.normalized.tolist() == pytest.approx(orca.normalized.tolist())
    places = small_system(1).places()
    n_input, n_output = int(apart.n_inputs[0]), int(apart.n_outputs[0])
    shapes = [IterationShape([n_input if not i else 1], [n_input + i]).sums() for i in range(n_output)]
    assert orca.normalized[0] == pytest.approx(sum(sum(places(shape)) for shape in shapes) / n_output)


# Memory.


def test_the_baseline_reserves_the_model_s_length_for_every_request():
    """ORCA 6.1: FasterTransformer cannot hold 8 requests of 13B on a GPU, nor 16 of 101B on eight."""
    single = Partition(model=PRESETS["gpt3-13b"], n_stages=1, n_devices=1)
    eight = Partition(model=PRESETS["gpt3-101b"], n_stages=1, n_devices=8)
    for partition, fits, does_not in ((single, 4, 8), (eight, 8, 16)):
        System(partition=partition, cluster=Cluster(), max_bs=fits, mbs=1).serving()
        with pytest.raises(DoesNotFit, match="would be reserved"):
            System(partition=partition, cluster=Cluster(), max_bs=does_not, mbs=1).serving()
        System(partition=partition, cluster=Cluster(), max_bs=64).serving()


@pytest.mark.parametrize("mbs", [None, 4])
def test_slower_devices_are_the_same_simulation_with_a_slower_clock(mbs: int | None):
    system = small_system(4, mbs, n_stages=2)
    slow = replace(system, cluster=replace(system.cluster, slowness=2.0))
    workload = paper_workload(60, rate=0.2)
    apart = Workload(workload.n_inputs, workload.n_outputs, 2 * workload.arrivals)
    result, expected = serve(slow, apart, rate=0.1).record(), serve(system, workload, rate=0.2).slower(2.0)
    assert result == pytest.approx(expected.record())


def test_a_model_that_does_not_fit_is_refused():
    half = Partition(model=PRESETS["gpt3-175b"], n_stages=1, n_devices=8)
    with pytest.raises(DoesNotFit, match=r"orca\(8\).*weights"):
        System(partition=half, cluster=Cluster(), max_bs=8).serving()


# Figure 10.


def test_the_engine_s_own_time_is_a_batch_s_iterations_one_after_the_other():
    places = Places(A100, Cluster())
    first = sum(places(IterationShape([128] * 4, [128] * 4).sums()))
    later = [sum(places(IterationShape([1] * 4, [128 + i] * 4).sums())) for i in range(1, 32)]
    assert figure_10.own_seconds(A100, Cluster(), 4) == pytest.approx((first + sum(later)) / 32)


def test_the_single_factor_matches_the_paper_s_time():
    slowness = figure_10.fitted_slowness()
    assert figure_10.own_seconds(A100, Cluster(slowness=slowness)) == pytest.approx(0.095)
    assert figure_10.fitted_slowness(1) > slowness > 1


LOAD = Load(lowest=0.005, n_requests=80, seconds=0.0)


def alone(system: System) -> float:
    """The normalized latency of requests that hardly meet."""
    return serve(system, paper_workload(30, rate=0.01), rate=0.01).normalized_median


@pytest.mark.parametrize("mbs", [None, 2])
def test_a_curve_ascends_to_saturation_and_is_dense_where_it_is_read(mbs: int | None):
    system = small_system(2, mbs)
    latency = 2 * alone(system)
    points = curve(system, latency, LOAD)
    rates = [point.rate for point in points]
    assert rates == sorted(rates)
    assert points[0].normalized_median < latency < points[-1].normalized_median
    assert points[-1].req_s < 0.9 * points[-1].rate
    at = throughput_at(points, latency)
    assert at is not None and points[0].req_s < at < rates[-1]
    ratios = [high.rate / low.rate for low, high in pairwise(points)]
    assert min(ratios) < 1.1 and max(ratios) < 1.7


def test_the_last_line_has_the_arguments():
    system = small_system(2)
    latency = 2 * alone(system)
    curves = {
        "orca(2)": curve(system, latency, LOAD),
        "ft(2, 2)": curve(replace(system, mbs=2), latency, LOAD),
    }
    first, second = (
        figure_10.Variant(slowness=slowness, own=latency / 2, latency=latency, curves=curves)
        for slowness in (1.5, 1.0)
    )
    line = figure_10.result("10b", first, second)
    assert (line["bench"], line["figure"], line["fitted"]) == ("simulate", "10b", True)
    assert (line["slowness"], line["unfitted"]["slowness"]) == (1.5, 1.0)
    assert line["normalized_latency_ms"] == pytest.approx(2 * line["own_ms"], abs=0.02)
    assert line["ratio"] == pytest.approx(line["orca_req_s"] / line["baseline_req_s"], rel=0.01)
    assert line["ratio"] > 1
    assert line["paper"]["ratio"] == 36.9
    plain = figure_10.result("10a", None, second)
    assert plain["fitted"] is False and "unfitted" not in plain
    assert plain["paper"] == {"baseline_peak_req_s": 0.49}
