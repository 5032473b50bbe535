"""After the loss of a worker: the engine is brought up again within bounds, and requests go on."""

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from orca_jax.config import RestartBound, ServingConfig
from orca_jax.errors import EngineError, OutputFailed, QueueFull, RequestTooLarge, WorkerLost
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.recovery import Recovery
from orca_jax.service.generation import Generation
from orca_jax.service.orca import Orca
from orca_jax.service.output import Output, no_stream
from tests.host.engines import MODEL, SOON, GatedEngine, at_rest, orca
from tests.host.fragile_engine import LOST, FragileEngine


def service_of(engine: FragileEngine, bound: RestartBound | None = None, max_queue: int = 100) -> Orca:
    config = ServingConfig(
        max_batch_size=4, n_slots=256, max_batch_tokens=64, block_size=8, max_queue=max_queue
    )
    kv = KVManager(n_blocks=32, block_size=8, n_rows=8, max_blocks_per_row=8)
    return Orca(engine, kv, config=config, model=MODEL, restarts=bound)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def rest(generation: Generation) -> list[int]:
    return list(generation.result(SOON).token_ids)


def test_a_stream_goes_on_where_it_stopped():
    engine = FragileEngine(True)
    with service_of(engine) as service:
        generations = [service.submit([10 * i], SamplingParams(max_tokens=6)) for i in range(2)]
        engine.let(2)
        first = generations[0].next_piece(SOON)
        assert first is not None
        engine.error = LOST
        engine.let(20)
        for i, generation in enumerate(generations):
            assert rest(generation) == list(range(10 * i, 10 * i + 6))
        pieces = [t for piece in generations[0] for t in piece.token_ids]
        assert [*first.token_ids, *pieces] == list(range(6)), "no token twice"
        assert service.trouble is None and service.failure is None
        assert (service.recovery.losses, engine.n_recovers) == (1, 1)
        assert at_rest(service)
    again = [batch for batch in engine.issued if batch[0] in ("initiation 2", "initiation 3")]
    assert [len(batch) for batch in again] == [1, 1], "both ran again, with all their tokens, each alone"


def test_what_one_request_costs_counts_as_one_loss():
    """Three requests in turn end alone: one loss with others in flight, and one more for each."""
    engine = FragileEngine(*[True] * 9)
    with service_of(engine, RestartBound(restarts=3, seconds=60)) as service:
        generations = [service.submit([0], SamplingParams(max_tokens=6))]
        assert engine.waited_for.wait(SOON)
        generations += [service.submit([10 * i], SamplingParams(max_tokens=6)) for i in range(1, 4)]
        engine.let(1)
        assert generations[0].next_piece(SOON) is not None
        for n_losses in range(1, 5):
            engine.error = LOST
            engine.let(1)
            until(lambda n=n_losses: service.recovery.recoveries == n)
        engine.let(50)
        for generation in generations[:3]:
            with pytest.raises(OutputFailed, match="while it ran alone, so it is not retried"):
                generation.result(SOON)
        assert rest(generations[3]) == list(range(30, 36))
        assert (service.recovery.losses, service.recovery.n_blamed) == (4, 3)
        assert service.failure is None and at_rest(service)


def test_while_the_engine_is_down_the_trouble_is_reported_and_requests_queue_up_to_the_bound():
    engine = FragileEngine()
    with service_of(engine, max_queue=2) as service:
        running = service.submit([1], SamplingParams(max_tokens=3))
        assert engine.waited_for.wait(SOON)
        engine.error = LOST
        engine.let(1)
        assert engine.is_down.wait(SOON)
        assert service.trouble == "stage 2: its process died"
        assert service.failure is None
        waiting = [service.submit([i], SamplingParams(max_tokens=2)) for i in (2, 3)]
        with pytest.raises(QueueFull):
            service.submit([4], SamplingParams(max_tokens=2))
        waiting[0].cancel()
        assert waiting[0].result(SOON).finish_reason is FinishReason.CANCELLED, "at once"
        running.end(FinishReason.TIMEOUT)
        assert running.result(SOON).finish_reason is FinishReason.TIMEOUT
        assert running.result(SOON).token_ids == []
        engine.recoveries.append(True)
        engine.let(20)
        assert rest(waiting[1]) == [3, 4]
        assert service.trouble is None


def test_a_dropped_generation_ends_while_the_engine_is_down():
    engine = FragileEngine()
    with service_of(engine) as service:
        dropped = service.submit([1], SamplingParams(max_tokens=3))
        other = service.submit([2], SamplingParams(max_tokens=3))
        assert engine.waited_for.wait(SOON)
        engine.error = LOST
        engine.let(1)
        assert engine.is_down.wait(SOON)
        ended = threading.Event()
        service.on_delivered = lambda deliveries: ended.set()
        del dropped
        gc.collect()
        assert ended.wait(SOON)
        assert [request.request_id for request in service.pool.in_arrival_order()] == [other.request_id]
        engine.recoveries.append(True)
        engine.let(20)
        assert rest(other) == [2, 3, 4]


def test_close_interrupts_a_recovery():
    engine = FragileEngine()
    service = service_of(engine)
    service.start()
    generation = service.submit([1], SamplingParams(max_tokens=3))
    assert engine.waited_for.wait(SOON)
    engine.error = LOST
    engine.let(1)
    assert engine.is_down.wait(SOON)
    service.close(SOON)
    assert generation.result(SOON).finish_reason is FinishReason.CANCELLED
    assert at_rest(service)


def test_a_worker_that_is_lost_while_nothing_runs_is_found_and_brought_up():
    engine = FragileEngine()
    engine.known_lost = LOST
    with service_of(engine) as service:
        assert engine.is_down.wait(SOON)
        assert service.trouble == "stage 2: its process died"
        engine.recoveries.append(True)
        engine.let(20)
        assert rest(service.submit([1], SamplingParams(max_tokens=2))) == [1, 2]


@pytest.mark.parametrize("restarts", [0, 2])
def test_past_the_bound_the_failure_is_final_and_names_the_reason(restarts: int):
    engine = FragileEngine(*[WorkerLost(i, f"loss {i}") for i in range(1, 9)])
    with (
        service_of(engine, RestartBound(restarts=restarts, seconds=60)) as service,
        ThreadPoolExecutor(1) as threads,
    ):
        generation = service.submit([1], SamplingParams(max_tokens=3))
        waiting = threads.submit(generation.result, SOON)
        assert engine.waited_for.wait(SOON)
        engine.error = WorkerLost(0, "loss 0")
        engine.let(1)
        message = f"lost {restarts + 1} times within 60 seconds, and {restarts} restarts are allowed"
        with pytest.raises(EngineError, match=f"{message}.*stage {restarts + 1}: loss {restarts}"):
            waiting.result(SOON)
        assert generation.finish_reason is FinishReason.ERROR
        assert isinstance(service.failure, EngineError)
        assert isinstance(service.failure.__cause__, WorkerLost)
        assert engine.n_recovers == restarts
        with pytest.raises(EngineError, match="accepts no more requests: workers were lost"):
            service.submit([1], SamplingParams())
        assert at_rest(service)


def test_an_engine_that_cannot_be_brought_up_fails_for_good():
    engine = GatedEngine()
    engine.error = LOST
    engine.let(1)
    with orca(engine) as service:
        with pytest.raises(EngineError, match="stage 2: its process died"):
            service.submit([1], SamplingParams()).result(SOON)
        assert service.failure is LOST


def test_another_error_of_an_engine_that_could_be_brought_up_is_final():
    engine = FragileEngine(True)
    engine.error = EngineError("our own mistake")
    engine.let(1)
    with service_of(engine) as service:
        with pytest.raises(EngineError, match="our own mistake"):
            service.submit([1], SamplingParams()).result(SOON)
        assert engine.n_recovers == 0


def test_the_bound_counts_losses_within_its_window():
    now = 0.0
    engine = FragileEngine()
    service = service_of(engine)
    recovery = Recovery(service.scheduler, bound=RestartBound(restarts=2, seconds=10), clock=lambda: now)
    troubles: list[WorkerLost | None] = []
    recovery.on_trouble = troubles.append
    for at in (0.0, 4.0, 10.0, 14.0, 20.0):
        now = at
        engine.known_lost = LOST
        assert recovery.step(lambda: False) is True
        assert recovery.trouble == str(LOST)
        engine.recoveries.append(True)
        assert recovery.step(lambda: False) is True
        assert recovery.trouble is None
        assert recovery.step(lambda: False) is False
    now = 23.9
    engine.known_lost = LOST
    with pytest.raises(EngineError, match="3 times within 10 seconds"):
        recovery.step(lambda: False)
    assert (recovery.losses, recovery.recoveries) == (6, 5)
    assert troubles == [LOST, None] * 5, "no end is reported for the final loss"


def test_the_figures_of_losses_and_recoveries():
    now = 100.0
    engine = FragileEngine()
    service = service_of(engine)
    recovery = Recovery(service.scheduler, bound=RestartBound(restarts=3), clock=lambda: now)
    seen: list[object] = []
    recovery.on_trouble = lambda lost: seen.append((recovery.trouble, recovery.last_recovery_seconds))

    def figures() -> tuple[int, int, float, float | None, int | None]:
        return (
            recovery.losses,
            recovery.recoveries,
            recovery.down_seconds,
            recovery.last_recovery_seconds,
            recovery.troubled_stage,
        )

    assert recovery.recoverable
    assert figures() == (0, 0, 0.0, None, None)
    assert recovery.step(lambda: False) is False
    now = 110.0
    assert figures() == (0, 0, 0.0, None, None)
    engine.known_lost = LOST
    recovery.step(lambda: False)
    assert figures() == (1, 0, 0.0, None, 1)
    now = 111.5
    assert figures() == (1, 0, 1.5, None, 1), "this time so far"
    recovery.step(lambda: True)
    assert figures() == (1, 0, 1.5, None, 1), "it was interrupted"
    now = 112.0
    engine.recoveries.append(WorkerLost(0, "another"))
    recovery.step(lambda: False)
    assert figures() == (2, 0, 2.0, None, 0), "it was down before, and still is"
    now = 114.0
    engine.recoveries.append(True)
    recovery.step(lambda: False)
    assert figures() == (2, 1, 4.0, 4.0, None)
    now = 150.0
    assert figures() == (2, 1, 4.0, 4.0, None)
    engine.known_lost = LOST
    recovery.step(lambda: False)
    now = 150.25
    engine.recoveries.append(True)
    recovery.step(lambda: False)
    assert figures() == (3, 2, 4.25, 0.25, None)
    engine.known_lost = LOST
    now = 160.0
    with pytest.raises(EngineError, match="4 times"):
        recovery.step(lambda: False)
    now = 161.0
    assert figures() == (4, 2, 5.25, 0.25, 1), "it stays down"
    lost, other = str(LOST), "stage 1: another"
    assert seen == [(lost, None), (other, None), (None, 4.0), (lost, 4.0), (None, 0.25)]


def test_an_engine_that_cannot_lose_workers_has_no_figures():
    recovery = orca(GatedEngine()).recovery
    assert not recovery.recoverable
    assert (recovery.losses, recovery.recoveries, recovery.down_seconds) == (0, 0, 0.0)


def test_the_longest_request_can_run_again():
    """Without its last token it has `max_batch_tokens` tokens, and another request runs too."""
    engine = FragileEngine(True)
    config = ServingConfig(max_batch_size=4, n_slots=256, max_batch_tokens=16, block_size=8)
    kv = KVManager(n_blocks=32, block_size=8, n_rows=8, max_blocks_per_row=8)
    service = Orca(engine, kv, config=config, model=MODEL)
    turn = service.recovery.step
    assert service.most_output(1) == 16
    requests = [
        Request(str(i), (i,), 1 + n_output, SamplingParams(max_tokens=n_output), seed=0, sink=None)
        for i, n_output in enumerate((16, 18, 2))
    ]
    longest, too_long, behind = requests
    with pytest.raises(RequestTooLarge, match="max_batch_tokens without chunked_prefill allow 17"):
        service.check(too_long.prompt_ids, service.rules(too_long.sampling))
    for request in (longest, behind):
        request.sink = Output(request, no_stream, lambda: None)
        service.pool.add(request)
    engine.let(15)
    for _ in range(15):
        assert turn(lambda: False)
    assert len(longest.output_ids) == 15 and behind.finish_reason is FinishReason.LENGTH
    engine.error = LOST
    engine.let(2)
    for _ in range(3):  # the loss, the recovery, the last iteration
        assert turn(lambda: False)
    assert engine.issued[-2:] == [["increment 16"], ["initiation 16"]]
    assert longest.output_ids == list(range(16))
    assert longest.finish_reason is FinishReason.LENGTH
    assert at_rest(service)
