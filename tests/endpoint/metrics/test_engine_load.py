"""An engine's load, worked out by hand: 256 slots in blocks of 8, and 4 places in a batch."""

import threading
from collections.abc import Iterator

import pytest

from orca_jax.config import ORCA, SchedulingConfig, ServingConfig
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.orca import Orca
from server.metrics.engine_metrics import batch_load, engine_load
from tests.host.engines import SOON, GatedEngine, at_rest, orca

ON_DEMAND = SchedulingConfig()
FULL = SchedulingConfig(reservation="full")


@pytest.fixture
def gated() -> Iterator[GatedEngine]:
    engine = GatedEngine()
    yield engine
    engine.let(1000)  # whatever the test does, the thread must end


def service_of(engine: GatedEngine, scheduling: SchedulingConfig) -> Orca:
    config = ServingConfig(
        max_batch_size=4, n_slots=256, max_batch_tokens=64, block_size=8, scheduling=scheduling
    )
    return orca(engine, config=config)


@pytest.mark.parametrize("scheduling", [ON_DEMAND, FULL, ORCA])
def test_a_request_counts_the_same_from_its_arrival_to_its_end(
    scheduling: SchedulingConfig, gated: GatedEngine
) -> None:
    with service_of(gated, scheduling) as service:
        assert (engine_load(service), batch_load(service)) == (0, 0)
        # 10 input and 20 output tokens are 30, in blocks 32 of the 256 slots.
        first = service.submit([1] * 10, SamplingParams(max_tokens=20, ignore_eos=True))
        assert (engine_load(service), batch_load(service)) == (32 / 256, 1 / 4)
        assert gated.waited_for.wait(SOON)
        # 40 and 17 are 57, in blocks 64; they wait, because the engine does not come back.
        second = service.submit([2] * 40, SamplingParams(max_tokens=17, ignore_eos=True))
        assert (service.pool.n_running, service.pool.n_waiting) == (1, 1)
        assert (engine_load(service), batch_load(service)) == (96 / 256, 2 / 4)
        gated.let(1000)
        first.result(SOON)
        second.result(SOON)
        wait_for_rest(service)
        assert (engine_load(service), batch_load(service)) == (0, 0)


def test_a_queue_has_a_load_above_one(gated: GatedEngine) -> None:
    with service_of(gated, ON_DEMAND) as service:
        params = SamplingParams(max_tokens=56, ignore_eos=True)
        held = [service.submit([i] * 8, params) for i in range(10)]  # each 64 slots, a quarter of all
        assert (engine_load(service), batch_load(service)) == (10 / 4, 10 / 4), held
        gated.let(1000)


def test_many_short_requests_fill_the_batch_before_the_slots(gated: GatedEngine) -> None:
    with service_of(gated, ON_DEMAND) as service:
        held = [service.submit([i], SamplingParams(max_tokens=7, ignore_eos=True)) for i in range(8)]
        assert (engine_load(service), batch_load(service)) == (8 / 32, 8 / 4), held  # a block of 32 each
        gated.let(1000)


def test_a_beam_search_counts_what_its_beams_do_not_share(gated: GatedEngine) -> None:
    with service_of(gated, ON_DEMAND) as service:
        # 20 input tokens: 2 full blocks together. To 20 + 13 = 33 tokens each of 3 beams has 3 blocks more.
        search = SamplingParams(max_tokens=13, n=3, use_beam_search=True)
        held = service.submit([1] * 20, search)
        assert (engine_load(service), batch_load(service)) == ((2 + 3 * 3) / 32, 3 / 4), held
        service.close()


def wait_for_rest(service: Orca) -> None:
    tick = threading.Event()
    for _ in range(int(SOON / 0.005)):
        if at_rest(service):
            return
        tick.wait(0.005)
    raise AssertionError("the service did not come to rest")
