"""A trace played in real time, on simulated iterations that take no time."""

import time

import pytest

from bench.paper.play import MakeScheduler, NotPlayed, play
from bench.paper.request_level import RequestLevelScheduler, RowWork
from orca_jax.config import ServingConfig
from orca_jax.errors import EngineError, InvalidRequest
from orca_jax.request.request import Request
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.request_pool import RequestPool
from orca_jax.scheduling.scheduler import Scheduler
from orca_jax.scheduling.timeline import Timeline
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock
from server.load.trace import TracedRequest

SOON = 30.0
CONFIG = ServingConfig(max_batch_size=4, n_slots=256, max_batch_tokens=64, block_size=8)
TRACE = (
    *(TracedRequest((1, 2, 3), n_output) for n_output in (4, 1, 2)),
    TracedRequest((5,), 3, arrival=0.01),
    TracedRequest((5, 6), 2, arrival=0.02),
)


def no_check(request: Request) -> None:
    """A check that admits every request."""


def orca(engine: SimulatedEngine) -> MakeScheduler:
    kv = KVManager(n_blocks=CONFIG.n_blocks, block_size=8, n_rows=8, max_blocks_per_row=8)

    def make(pool: RequestPool, timeline: Timeline) -> Scheduler:
        return Scheduler(pool, engine, kv, config=CONFIG, timeline=timeline)

    return make


def baseline(engine: SimulatedEngine) -> MakeScheduler:
    kv = KVManager(n_blocks=CONFIG.n_blocks, block_size=8, n_rows=8, max_blocks_per_row=8)

    def make(pool: RequestPool, timeline: Timeline) -> RequestLevelScheduler:
        return RequestLevelScheduler(pool, engine, kv, max_bs=4, mbs=4, max_length=64, timeline=timeline)

    return make


@pytest.mark.parametrize("make", [orca, baseline])
def test_every_request_is_played_from_its_planned_arrival_to_its_end(make: type) -> None:
    ended: list[int] = []
    records = play(
        TRACE, make(SimulatedEngine(VirtualClock())), deadline=SOON, check=no_check, on_finished=ended.append
    )
    assert sum(ended) == len(TRACE)
    by_name = {record.request_id: record for record in records.requests}
    for i, traced in enumerate(TRACE):
        record = by_name[str(i)]
        assert (record.n_input, record.n_output) == (len(traced.prompt_ids), traced.n_output)
        assert record.arrived == traced.arrival
        assert record.scheduled is not None and record.finished is not None
        assert record.arrived <= record.scheduled <= record.finished
    # Those that are there at the start are there when the scheduler first looks.
    assert records.iterations[0].request_ids == ("0", "1", "2")
    assert len(records.rows) == (len(records.iterations) if make is baseline else 0)
    if make is baseline:
        works = [row.rows for row in records.rows if row.batch == 0]
        assert [works.count(RowWork.DONE) for works in works] == [0, 1, 2, 2]


def test_what_the_engine_raises_is_raised() -> None:
    engine = SimulatedEngine(VirtualClock())
    engine.fail("wait")
    with pytest.raises(EngineError, match="as requested"):
        play(TRACE, orca(engine), deadline=SOON, check=no_check)


def test_a_refused_request_is_reported() -> None:
    def check(request: Request) -> None:
        if len(request.prompt_ids) == 1:
            raise InvalidRequest("one token is not enough", param="prompt")

    with pytest.raises(InvalidRequest, match="not enough"):
        play(TRACE, orca(SimulatedEngine(VirtualClock())), deadline=SOON, check=check)


def test_a_trace_that_goes_on_beyond_the_deadline_is_given_up() -> None:
    late = (*TRACE, TracedRequest((1,), 1, arrival=10_000.0))
    start = time.monotonic()
    with pytest.raises(NotPlayed, match=r"5 of 6 requests ended within 0\.2 s"):
        play(late, orca(SimulatedEngine(VirtualClock())), deadline=0.2, check=no_check)
    assert time.monotonic() - start < SOON
