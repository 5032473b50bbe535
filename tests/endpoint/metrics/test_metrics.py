"""`/metrics`, for requests whose times and tokens are worked out by hand."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

import orca_jax
from orca_jax.config import RestartBound, SchedulingConfig, ServingConfig
from orca_jax.engine.remote_workers import RemoteWorkers
from orca_jax.engine.stage_counters import RemoteCounters, StageCounters
from orca_jax.errors import EngineError, WorkerLost
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.recurrence_config import ShortConvolution
from orca_jax.request.request import FinishReason
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.engine_protocol import Engine
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.service.orca import Orca
from server.gateway.gateway import Gateway
from server.gateway.served_model import ServedModel
from server.metrics.engine_metrics import Workers
from server.metrics.metrics import Metrics
from tests.host.engines import CONFIG, EOS, MODEL, SOON, GatedEngine, at_rest, simulated, writing
from tests.host.fragile_engine import LOST, FragileEngine

Scrape = dict[tuple[str, frozenset[tuple[str, str]]], float]

ENGINE = {
    "orca_num_requests_running": "gauge",
    "orca_num_requests_waiting": "gauge",
    "orca_request_held": "gauge",
    "orca_kv_cache_usage_perc": "gauge",
    "orca_cache_config_info": "gauge",
    "orca_engine_load": "gauge",
    "orca_batch_load": "gauge",
    "orca_slots_total": "gauge",
    "orca_slots_reserved": "gauge",
    "orca_slots_used": "gauge",
    "orca_states_total": "gauge",
    "orca_states_used": "gauge",
    "orca_state_snapshots_most": "gauge",
    "orca_state_snapshots": "gauge",
    "orca_state_snapshots_made": "counter",
    "orca_state_snapshots_used": "counter",
    "orca_state_snapshots_evicted": "counter",
    "orca_kv_host_blocks": "gauge",
    "orca_kv_host_bytes": "gauge",
    "orca_kv_host_bytes_most": "gauge",
    "orca_kv_host_blocks_stored": "counter",
    "orca_kv_host_blocks_read": "counter",
    "orca_kv_host_blocks_evicted": "counter",
    "orca_kv_host_states": "gauge",
    "orca_kv_host_states_stored": "counter",
    "orca_kv_host_states_read": "counter",
    "orca_kv_host_states_evicted": "counter",
    "orca_kv_disk_blocks": "gauge",
    "orca_kv_disk_bytes": "gauge",
    "orca_kv_disk_blocks_written": "counter",
    "orca_kv_disk_blocks_read": "counter",
    "orca_kv_disk_blocks_bad": "counter",
    "orca_kv_disk_blocks_removed": "counter",
    "orca_kv_lease_bytes": "gauge",
    "orca_kv_leases_granted": "counter",
    "orca_kv_leases_taken": "counter",
    "orca_kv_leases_expired": "counter",
    "orca_kv_transfers": "counter",
    "orca_kv_transfers_failed": "counter",
    "orca_kv_transfer_blocks": "counter",
    "orca_kv_transfers_under_way": "gauge",
    "orca_prefix_cache_blocks": "gauge",
    "orca_prefix_cache_queries": "counter",
    "orca_prefix_cache_hits": "counter",
    "orca_prefix_cache_evictions": "counter",
    "orca_num_preemptions": "counter",
    "orca_recomputed_tokens": "counter",
    "orca_requests": "counter",
    "orca_prompt_tokens": "counter",
    "orca_generation_tokens": "counter",
    "orca_request_success": "counter",
    "orca_iterations": "counter",
    "orca_iteration_padding_tokens": "counter",
    "orca_time_to_first_token_seconds": "histogram",
    "orca_inter_token_latency_seconds": "histogram",
    "orca_e2e_request_latency_seconds": "histogram",
    "orca_request_queue_time_seconds": "histogram",
    "orca_request_normalized_latency_seconds_per_token": "histogram",
    "orca_request_prompt_tokens": "histogram",
    "orca_request_generation_tokens": "histogram",
    "orca_iteration_batch_size": "histogram",
    "orca_iteration_tokens": "histogram",
    "orca_iteration_bucket_tokens": "histogram",
    "orca_iteration_seconds": "histogram",
}
RECOVERABLE = {
    "orca_worker_losses": "counter",
    "orca_worker_recoveries": "counter",
    "orca_worker_blamed_requests": "counter",
    "orca_worker_down_seconds": "counter",
    "orca_worker_last_recovery_seconds": "gauge",
}
REMOTE = {
    "orca_worker_up": "gauge",
    "orca_control_messages": "counter",
    "orca_control_message_bytes": "counter",
    "orca_control_stale_frames": "counter",
    "orca_control_duplicate_frames": "counter",
    "orca_control_rubbish_frames": "counter",
    "orca_link_bytes": "counter",
    "orca_stage_iterations": "counter",
}
SERVER = {
    "orca_build_info": "gauge",
    "orca_server_phase": "gauge",
    "orca_live_streams": "gauge",
    "orca_http_requests": "counter",
    "orca_grpc_requests": "counter",
}


async def _metrics() -> tuple[Gateway, Metrics]:
    gateway = Gateway()
    return gateway, Metrics(gateway)


def observed(
    engine: Engine,
    *,
    config: ServingConfig = CONFIG,
    bucket_sizes: Sequence[int] = (),
    clock: Callable[[], float] = time.monotonic,
    restarts: RestartBound | None = None,
    model: ModelConfig = MODEL,
) -> tuple[Orca, Metrics]:
    """A service that is not started, with metrics attached."""
    kv = KVManager(
        n_blocks=config.n_blocks,
        block_size=config.block_size,
        n_rows=2 * config.max_batch_size,
        max_blocks_per_row=MODEL.n_positions // config.block_size,
        prefix_caching=config.scheduling.prefix_caching,
        n_snapshots=config.n_snapshots,
        n_host_blocks=config.n_host_blocks,
        n_host_states=config.n_host_states,
    )
    service = Orca(
        engine, kv, config=config, model=model, bucket_sizes=bucket_sizes, clock=clock, restarts=restarts
    )
    _, metrics = asyncio.run(_metrics())
    metrics.attach(ServedModel(name="test", service=service, config=model, serving=config))
    return service, metrics


def families(metrics: Metrics) -> dict[str, str]:
    """Names and types of all metrics."""
    text = metrics.render().decode()
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def scrape(metrics: Metrics) -> Scrape:
    """Every sample, as Prometheus's own parser reads it."""
    samples: Scrape = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
    return samples


def of_engine(samples: Scrape, name: str, **labels: str) -> float:
    return samples[f"orca_{name}", frozenset({"model_name": "test", **labels}.items())]


def histogram(samples: Scrape, name: str) -> dict[float, float]:
    """Cumulative counts by upper bound, after checking the invariants of every histogram."""
    result: dict[float, float] = {}
    for (sample, labels), value in samples.items():
        if sample == f"orca_{name}_bucket":
            assert dict(labels)["model_name"] == "test"
            result[float(dict(labels)["le"])] = value
    bounds = sorted(result)
    assert [result[bound] for bound in bounds] == sorted(result.values()), f"{name} does not grow"
    assert bounds[-1] == math.inf
    assert result[math.inf] == of_engine(samples, f"{name}_count")
    return result


def totals(samples: Scrape, name: str) -> tuple[float, float]:
    """A histogram's count and sum."""
    return histogram(samples, name)[math.inf], of_engine(samples, f"{name}_sum")


def until(condition: Callable[[], bool], what: str) -> None:
    tick = threading.Event()
    for _ in range(int(SOON / 0.005)):
        if condition():
            return
        tick.wait(0.005)
    raise AssertionError(f"{what} did not come within {SOON:g} seconds")


@pytest.fixture
def gated() -> Iterator[GatedEngine]:
    engine = GatedEngine()
    yield engine
    engine.let(1000)  # whatever the test does, the thread must end


# Engine metrics


def test_every_time_and_token_of_four_requests() -> None:
    # Iterations take a second each. A runs from 0 to 4. B, C and D arrive at 0.5; there are three rows, so D
    # waits until it times out. C is cancelled during its second iteration.
    engine = simulated()
    clock = engine.clock
    config = ServingConfig(max_batch_size=3, n_slots=256, max_batch_tokens=64, block_size=8, overlap=False)
    service, metrics = observed(engine, config=config, bucket_sizes=[4, 16, 64], clock=clock.now)
    generations = []

    def submit(name: str, n_input: int, n_output: int) -> None:
        params = SamplingParams(max_tokens=n_output)
        generations.append(service.submit([5] * n_input, params, request_id=name))

    clock.call_at(0.5, lambda: submit("B", 5, 2))
    clock.call_at(0.5, lambda: submit("C", 2, 10))
    clock.call_at(0.5, lambda: submit("D", 4, 10))
    clock.call_at(1.5, lambda: generations[3].end(FinishReason.TIMEOUT))
    clock.call_at(2.5, lambda: generations[2].end(FinishReason.CANCELLED))
    with service:
        submit("A", 3, 4)
        generations[0].result(SOON)
        until(lambda: at_rest(service), "rest")
        samples = scrape(metrics)

    assert of_engine(samples, "requests_total") == 4
    ended = {"stop": 0, "length": 2, "cancelled": 1, "timeout": 1, "error": 0}
    for reason, count in ended.items():
        assert of_engine(samples, "request_success_total", finished_reason=reason) == count
    assert of_engine(samples, "prompt_tokens_total") == 3 + 5 + 2  # D never ran
    assert of_engine(samples, "generation_tokens_total") == 4 + 2 + 1

    first = histogram(samples, "time_to_first_token_seconds")  # A 1.0, B and C 1.5
    assert (first[0.75], first[1.0], first[2.5]) == (0, 1, 3)
    assert totals(samples, "time_to_first_token_seconds") == (3, 4.0)
    assert totals(samples, "request_queue_time_seconds") == (3, 0.0 + 0.5 + 0.5)
    gaps = histogram(samples, "inter_token_latency_seconds")  # three of A, one of B
    assert (gaps[0.75], gaps[1.0]) == (0, 4)
    assert totals(samples, "inter_token_latency_seconds") == (4, 4.0)
    assert totals(samples, "e2e_request_latency_seconds") == (2, 4.0 + 2.5)
    assert totals(samples, "request_normalized_latency_seconds_per_token") == (2, 4.0 / 4 + 2.5 / 2)
    assert totals(samples, "request_prompt_tokens") == (2, 3 + 5)
    assert totals(samples, "request_generation_tokens") == (2, 4 + 2)

    # A alone; all three, B and C with their prompts; all three; A alone.
    assert of_engine(samples, "iterations_total") == 4
    assert totals(samples, "iteration_batch_size") == (4, 1 + 3 + 3 + 1)
    assert totals(samples, "iteration_tokens") == (4, 3 + 8 + 3 + 1)
    assert totals(samples, "iteration_bucket_tokens") == (4, 4 + 16 + 4 + 4)
    assert of_engine(samples, "iteration_padding_tokens_total") == 1 + 8 + 1 + 3
    assert totals(samples, "iteration_seconds") == (4, 4.0)


def test_gauges_show_the_current_state(gated: GatedEngine) -> None:
    config = ServingConfig(max_batch_size=1, n_slots=256, max_batch_tokens=64, block_size=8)
    service, metrics = observed(gated, config=config)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    slots = ("slots_total", "slots_reserved", "slots_used")

    def now() -> list[float]:
        samples = scrape(metrics)
        return [of_engine(samples, name) for name in (*names, *slots)]

    with service:
        assert now() == [0, 0, 0, 256, 0, 0]
        a = service.submit([5] * 3, SamplingParams(max_tokens=9))  # 12 tokens: two blocks of 8
        b = service.submit([5] * 3, SamplingParams(max_tokens=2))  # one at a time, so it waits
        assert gated.waited_for.wait(SOON)
        assert now() == [1, 1, 2 / 32, 256, 16, 0]  # the prompt is being written to the cache
        for n_outputs in (1, 2):
            gated.waited_for.clear()
            gated.let(1)
            assert a.next_piece(SOON) is not None
            assert gated.waited_for.wait(SOON)
            assert now() == [1, 1, 2 / 32, 256, 16, 3 + n_outputs - 1]
        gated.let(100)
        assert len(b.result(SOON).token_ids) == 2
        until(lambda: at_rest(service), "rest")
        assert now() == [0, 0, 0, 256, 0, 0]


@pytest.mark.parametrize("recurrent", [False, True])
def test_states_are_those_of_admitted_requests(gated: GatedEngine, recurrent: bool) -> None:
    (layer, *_) = MODEL.layers
    mixing = replace(layer, attention=None, recurrence=ShortConvolution(channels=MODEL.hidden_size, width=3))
    hybrid = replace(MODEL, layers=(mixing, *MODEL.layers))
    config = ServingConfig(max_batch_size=2, n_slots=256, max_batch_tokens=64, block_size=8)
    service, metrics = observed(gated, config=config, model=hybrid if recurrent else MODEL)

    def now() -> tuple[float, ...]:
        samples = scrape(metrics)
        return tuple(of_engine(samples, name) for name in ("states_total", "states_used"))

    with service:
        assert now() == (4 * recurrent, 0)
        three = [service.submit([5] * 3, SamplingParams(max_tokens=9)) for _ in range(3)]  # the third waits
        for _ in range(2):  # the first iteration may have begun before the second request came
            assert gated.waited_for.wait(SOON)
            gated.waited_for.clear()
            gated.let(1)
        assert gated.waited_for.wait(SOON)
        assert now() == (4 * recurrent, 2 * recurrent)
        gated.let(1000)
        assert all(len(each.result(SOON).token_ids) == 9 for each in three)
        until(lambda: at_rest(service), "rest")
        assert now() == (4 * recurrent, 0)


def test_the_host_tier_has_the_bytes_of_blocks_and_states(gated: GatedEngine) -> None:
    config = ServingConfig(
        max_batch_size=2,
        n_slots=256,
        max_batch_tokens=64,
        block_size=8,
        n_snapshots=1,
        n_host_blocks=5,
        host_block_bytes=100,
        n_host_states=2,
        host_state_bytes=1000,
        scheduling=SchedulingConfig(),
    )
    service, metrics = observed(gated, config=config)
    host, states = service.scheduler.kv.tiers
    for i in range(3):
        host.store(bytes([i]), i)
        states.store(bytes([i]), i)
    samples = scrape(metrics)
    names = ("blocks", "states", "bytes", "bytes_most", "states_stored_total", "states_evicted_total")
    assert [of_engine(samples, f"kv_host_{name}") for name in names] == [3, 2, 2300, 2500, 3, 1]


def test_shared_slots_are_used_once(gated: GatedEngine) -> None:
    config = ServingConfig(
        max_batch_size=2, n_slots=256, max_batch_tokens=64, block_size=8, scheduling=SchedulingConfig()
    )
    service, metrics = observed(gated, config=config)
    with service:
        generations = [service.submit([5] * 20, SamplingParams(max_tokens=9)) for _ in range(2)]
        for _ in range(3):  # the first prompt; its next token, and the end of the second prompt; both
            assert gated.waited_for.wait(SOON)
            gated.waited_for.clear()
            gated.let(1)
        assert gated.waited_for.wait(SOON)
        pieces = [generation.next_piece(SOON) for generation in generations]
        assert [len(piece.token_ids) for piece in pieces if piece is not None] == [3, 2]
        samples = scrape(metrics)
        # Two blocks are shared, and each request has another one: with 6 tokens and with 5.
        assert of_engine(samples, "slots_reserved") == 8 * (2 + 1 + 1)
        assert of_engine(samples, "slots_used") == 16 + 6 + 5
        gated.let(1000)


def test_prompt_tokens_looked_up_found_and_evicted() -> None:
    scheduling = SchedulingConfig()
    config = ServingConfig(
        max_batch_size=2, n_slots=48, max_batch_tokens=48, block_size=8, scheduling=scheduling
    )
    service, metrics = observed(simulated(), config=config)
    seen: list[tuple[float, ...]] = []
    with service:
        for first_token in (1, 1, 2, 3):  # two full blocks and a token; the third block is not kept
            service.submit([first_token, *[5] * 16], SamplingParams(max_tokens=1)).result(SOON)
            until(lambda: at_rest(service), "rest")
            samples = scrape(metrics)
            names = ("queries_total", "hits_total", "evictions_total", "blocks")
            seen.append(tuple(of_engine(samples, f"prefix_cache_{name}") for name in names))
    assert seen == [(17, 0, 0, 2), (34, 16, 0, 2), (51, 16, 0, 4), (68, 16, 1, 5)]
    assert of_engine(samples, "num_preemptions_total") == of_engine(samples, "recomputed_tokens_total") == 0


def test_drafts_and_those_that_became_output() -> None:
    scheduling = SchedulingConfig(speculative="ngram", speculative_tokens=2)
    service, metrics = observed(simulated(writing("ab")), config=replace(CONFIG, scheduling=scheduling))
    # From the sixth token on, since an iteration runs ahead of the fifth, whose last three have come before:
    # the outputs have 6, 9, 12 and 13 tokens.
    with service:
        service.submit([1], SamplingParams(max_tokens=13)).result(SOON)
        samples = scrape(metrics)
    assert of_engine(samples, "spec_decode_num_draft_tokens_total") == 4
    assert of_engine(samples, "spec_decode_num_accepted_tokens_total") == 4


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preemptions_and_the_tokens_that_they_cost(gated: GatedEngine, prefix_caching: bool) -> None:
    scheduling = SchedulingConfig(prefix_caching=prefix_caching)
    config = ServingConfig(
        max_batch_size=2, n_slots=48, max_batch_tokens=48, block_size=8, scheduling=scheduling
    )
    service, metrics = observed(gated, config=config)
    with service:  # 37 tokens each are computed, which take five of the six blocks
        generations = [service.submit([i] * 8, SamplingParams(max_tokens=30)) for i in (1, 2)]
        gated.let(1000)
        for generation in generations:
            assert len(generation.result(SOON).token_ids) == 30
        until(lambda: at_rest(service), "rest")
        samples = scrape(metrics)
    _, n_computed = totals(samples, "iteration_tokens")
    assert of_engine(samples, "num_preemptions_total") > 0
    assert of_engine(samples, "recomputed_tokens_total") == n_computed - 2 * 37 > 0
    n_queries = of_engine(samples, "prefix_cache_queries_total")
    assert n_queries == (16 if prefix_caching else 0), (
        "a preempted request looks up again, and is not counted"
    )


def test_a_loss_of_a_worker_is_no_preemption() -> None:
    engine = FragileEngine(True)
    config = ServingConfig(
        max_batch_size=4, n_slots=256, max_batch_tokens=64, block_size=8, scheduling=SchedulingConfig()
    )
    service, metrics = observed(engine, config=config)
    with service:
        generation = service.submit([5] * 20, SamplingParams(max_tokens=3))
        assert engine.waited_for.wait(SOON)
        engine.error = LOST
        engine.let(10)
        assert len(generation.result(SOON).token_ids) == 3
        samples = scrape(metrics)
    assert of_engine(samples, "worker_losses_total") == 1
    assert of_engine(samples, "num_preemptions_total") == of_engine(samples, "recomputed_tokens_total") == 0
    assert of_engine(samples, "prefix_cache_queries_total") == 20


def test_stopped_and_failed_requests_are_counted_by_reason() -> None:
    service, metrics = observed(simulated(lambda _, index: EOS if index == 2 else 7))
    with service:
        service.submit([5], SamplingParams(max_tokens=9)).result(SOON)
        assert of_engine(scrape(metrics), "request_success_total", finished_reason="stop") == 1
        assert totals(scrape(metrics), "request_generation_tokens") == (1, 3)


def test_requests_of_a_failed_engine_are_counted(gated: GatedEngine) -> None:
    service, metrics = observed(gated)
    with service:
        generations = [service.submit([5], SamplingParams(max_tokens=9)) for _ in range(3)]
        gated.error = EngineError("gone")
        gated.let(1)
        for generation in generations:
            with pytest.raises(EngineError):
                generation.result(SOON)
    samples = scrape(metrics)
    assert of_engine(samples, "requests_total") == 3
    assert of_engine(samples, "request_success_total", finished_reason="error") == 3
    assert totals(samples, "e2e_request_latency_seconds") == (0, 0)


def test_requests_that_end_before_their_first_token(gated: GatedEngine) -> None:
    """Requests that end before their first token count only as ended requests."""
    service, metrics = observed(gated)
    with service:
        generation = service.submit([5], SamplingParams(max_tokens=9))
        assert gated.waited_for.wait(SOON)
        generation.cancel()
        gated.let(1)
        until(lambda: at_rest(service), "rest")
    samples = scrape(metrics)
    assert of_engine(samples, "request_success_total", finished_reason="cancelled") == 1
    assert of_engine(samples, "generation_tokens_total") == of_engine(samples, "prompt_tokens_total") == 0
    assert totals(samples, "request_queue_time_seconds") == (0, 0)
    assert of_engine(samples, "iterations_total") == 1


def test_a_scrape_under_load_is_consistent() -> None:
    service, metrics = observed(simulated())
    done = threading.Event()

    def load(worker: int) -> int:
        n_tokens = 0
        for i in range(60):
            generation = service.submit([worker], SamplingParams(max_tokens=1 + (worker + i) % 40))
            if i % 7 == 3:
                generation.cancel()
            n_tokens += len(generation.result(SOON).token_ids)
        return n_tokens

    def look() -> list[Scrape]:
        seen: list[Scrape] = []
        while True:
            last = done.is_set()
            seen.append(scrape(metrics))
            if last:
                return seen

    with service, ThreadPoolExecutor(7) as pool:
        looking = pool.submit(look)
        try:
            n_tokens = sum(pool.map(load, range(6), timeout=SOON))
            until(lambda: at_rest(service), "rest")
        finally:
            done.set()
        seen = looking.result(SOON)

    assert len(seen) > 2
    before = 0.0
    for samples in seen:
        for name, kind in ENGINE.items():
            if kind == "histogram":
                histogram(samples, name.removeprefix("orca_"))
        generated = of_engine(samples, "generation_tokens_total")
        n_first, _ = totals(samples, "time_to_first_token_seconds")
        n_later, _ = totals(samples, "inter_token_latency_seconds")
        assert generated == n_first + n_later >= before
        before = generated
        assert ends(samples) <= of_engine(samples, "requests_total")
        assert of_engine(samples, "iterations_total") == totals(samples, "iteration_batch_size")[0]
    assert before == n_tokens
    assert ends(seen[-1]) == of_engine(seen[-1], "requests_total") == 6 * 60


def ends(samples: Scrape) -> float:
    return sum(
        of_engine(samples, "request_success_total", finished_reason=reason.value) for reason in FinishReason
    )


# Worker processes


@dataclass
class StandIn:
    """A stand-in for workers."""

    counters: RemoteCounters = field(default_factory=RemoteCounters)
    stages: list[StageCounters] = field(default_factory=lambda: [StageCounters() for _ in range(3)])


class RemoteStandIn(FragileEngine):
    """An engine with stand-in workers."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = StandIn()


def as_workers(workers: RemoteWorkers) -> Workers:
    """For the type checker: the real workers have the attributes that the metrics need."""
    return workers


def test_losses_and_recoveries_are_counted_and_timed() -> None:
    now = 100.0
    engine = RemoteStandIn()
    service, metrics = observed(engine, clock=lambda: now, restarts=RestartBound(restarts=2))

    def turn() -> None:
        service.recovery.step(lambda: False)

    def seen() -> tuple[list[float], list[float]]:
        samples = scrape(metrics)
        figures = [
            of_engine(samples, f"worker_{name}_total") for name in ("losses", "recoveries", "down_seconds")
        ]
        last = ("orca_worker_last_recovery_seconds", frozenset({("model_name", "test")}))
        figures += [samples[last]] if last in samples else []
        return figures, [of_engine(samples, "worker_up", stage=stage) for stage in ("1", "2", "3")]

    assert seen() == ([0, 0, 0], [1, 1, 1])
    engine.known_lost = LOST
    turn()
    now = 100.5
    assert seen() == ([1, 0, 0.5], [1, 0, 1])
    engine.recoveries.append(WorkerLost(2, "its line broke"))
    turn()
    now = 102.0
    assert seen() == ([2, 0, 2.0], [1, 1, 0])
    engine.recoveries.append(True)
    turn()
    now = 130.0
    assert seen() == ([2, 1, 2.0, 2.0], [1, 1, 1])
    engine.known_lost = WorkerLost(0, "its line broke")
    with pytest.raises(EngineError, match="3 times"):
        turn()
    now = 131.0
    assert seen() == ([3, 1, 3.0, 2.0], [0, 1, 1])


def test_control_plane_and_stage_counters() -> None:
    engine = RemoteStandIn()
    _, metrics = observed(engine)
    engine.workers.counters = RemoteCounters(
        stale=1, duplicates=2, malformed=3, message_bytes=400, messages=5
    )
    engine.workers.stages[0] = StageCounters(link_bytes=6000, received=7, done=6)
    engine.workers.stages[2] = StageCounters(link_bytes=0, received=5, done=0)
    samples = scrape(metrics)
    for name, count in (
        ("control_messages", 5),
        ("control_message_bytes", 400),
        ("control_stale_frames", 1),
        ("control_duplicate_frames", 2),
        ("control_rubbish_frames", 3),
    ):
        assert of_engine(samples, f"{name}_total") == count
    for name, counts in (("link_bytes", (6000, 0, 0)), ("stage_iterations", (7, 0, 5))):
        for stage, count in zip("123", counts, strict=True):
            assert of_engine(samples, f"{name}_total", stage=stage) == count


def test_worker_metrics_depend_on_the_engines_workers() -> None:
    for engine, expected in (
        (simulated(), ENGINE),
        (FragileEngine(), ENGINE | RECOVERABLE),
        (RemoteStandIn(), ENGINE | RECOVERABLE | REMOTE),
    ):
        _, metrics = observed(engine)
        result = {name for name in families(metrics) if name.startswith("orca_")}
        assert result - SERVER.keys() - {"orca_asyncio_tasks"} == expected.keys()
    _, metrics = observed(RemoteStandIn())
    assert (ENGINE | RECOVERABLE | REMOTE).items() <= families(metrics).items()


# Names


def test_the_names_and_types_of_all_metrics() -> None:
    service, metrics = observed(simulated())
    metrics.http_request("/health", "GET", 200)
    metrics.grpc_request("Generate", "OK")
    result = families(metrics)
    ours = {name: kind for name, kind in result.items() if name.startswith("orca_")}
    created = {"orca_http_requests_created": "gauge", "orca_grpc_requests_created": "gauge"}
    assert ours == ENGINE | SERVER | created
    assert result["process_resident_memory_bytes"] == "gauge"
    assert "python_info" in result and "python_gc_collections" in result
    text = metrics.render().decode()
    for line in text.splitlines():
        name = line.split("{")[0].split(" ")[0]
        if any(name.startswith(engine) for engine in ENGINE):
            assert 'model_name="test"' in line
    service.close()


def test_before_the_model_is_loaded_there_are_only_server_metrics() -> None:
    _, metrics = asyncio.run(_metrics())
    result = families(metrics)
    assert SERVER.keys() <= result.keys()
    assert not ENGINE.keys() & result.keys()


def test_the_content_type_is_that_of_the_text_format() -> None:
    assert Metrics.content_type == "text/plain; version=0.0.4; charset=utf-8"


# Server metrics


def test_requests_are_counted_by_route_and_status() -> None:
    _, metrics = asyncio.run(_metrics())
    for status in (200, 200, 400):
        metrics.http_request("/v1/completions", "POST", status)
    metrics.http_request("/health", "BREW", 405)  # whatever clients send, the number of labels is bounded
    metrics.http_request("/health", "PROPFIND", 405)
    metrics.grpc_request("Generate", "CANCELLED")
    samples = scrape(metrics)

    def http(path: str, method: str, status: str) -> float:
        labels = frozenset({"path": path, "method": method, "status": status}.items())
        return samples["orca_http_requests_total", labels]

    assert http("/v1/completions", "POST", "200") == 2
    assert http("/v1/completions", "POST", "400") == 1
    assert http("/health", "other", "405") == 2
    labels = frozenset({"method": "Generate", "code": "CANCELLED"}.items())
    assert samples["orca_grpc_requests_total", labels] == 1


def test_the_phases_of_a_server_and_its_version(gated: GatedEngine) -> None:
    service, _ = observed(gated)
    model = ServedModel(name="test", service=service, config=MODEL, serving=CONFIG)

    def phases(metrics: Metrics) -> dict[str, float]:
        return {
            dict(labels)["phase"]: value
            for (name, labels), value in scrape(metrics).items()
            if name == "orca_server_phase"
        }

    async def live() -> list[dict[str, float]]:
        gateway, metrics = await _metrics()
        assert scrape(metrics)["orca_build_info", frozenset({("version", orca_jax.__version__)})] == 1
        seen = [phases(metrics)]
        gateway.open(model)
        seen.append(phases(metrics))
        with service:
            with gateway.submit([5], SamplingParams(max_tokens=2), request_id="A"):
                assert scrape(metrics)["orca_live_streams", frozenset()] == 1
                service._failure = EngineError("gone")
                seen.append(phases(metrics))
                service._failure = None
                service.recovery._lost = LOST
                seen.append(phases(metrics))
                service.recovery._lost = None
            assert scrape(metrics)["orca_live_streams", frozenset()] == 0
            gated.let(100)
        await gateway.drain(1.0)
        seen.append(phases(metrics))
        return seen

    result = asyncio.run(live())
    names = ("loading", "ready", "failed", "recovering", "draining")
    every = (*names, "paused", "asleep")
    assert result == [{name: float(name == current) for name in every} for current in names]


def test_tasks_on_the_event_loop_are_counted() -> None:
    async def count() -> tuple[float, float]:
        _, metrics = await _metrics()
        alone = scrape(metrics)["orca_asyncio_tasks", frozenset()]
        tasks = [asyncio.create_task(asyncio.Event().wait()) for _ in range(3)]
        more = scrape(metrics)["orca_asyncio_tasks", frozenset()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=SOON)
        return alone, more

    assert asyncio.run(count()) == (1, 4)
