"""After the loss of a worker: the engine is brought up again within bounds, and requests go on."""

import gc
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from orca_jax.config import RestartBound, ServingConfig
from orca_jax.errors import EngineError, QueueFull, RequestTooLarge, WorkerLost
from orca_jax.generation import Generation, Mailbox
from orca_jax.kv_manager import KVManager
from orca_jax.recovery import Recovery
from orca_jax.request import FinishReason, Request, SamplingParams
from orca_jax.scheduler import Returned
from orca_jax.service import Orca
from tests.host.engines import MODEL, SOON, GatedEngine, at_rest, counting, orca

LOST = WorkerLost(1, "its process died")


class FragileEngine(GatedEngine):
    """Loses a worker when `error` is set, and is up again when the test lets it.

    `recoveries` holds what each call of `recover` does: True or an error. Empty: it waits until interrupted.
    """

    def __init__(self, *recoveries: bool | Exception) -> None:
        super().__init__(counting)
        self.recoveries: deque[bool | Exception] = deque(recoveries)
        self.n_recovers = 0
        self.known_lost: WorkerLost | None = None
        self.is_down = threading.Event()
        self.issued: list[list[str]] = []

    def issue(self, batch: Sequence[Request]) -> None:
        self.issued.append([f"{req.state.value} {req.n_tokens}" for req in batch])
        super().issue(batch)

    def wait(self, interrupted: Callable[[], bool]) -> Returned | None:
        try:
            return super().wait(interrupted)
        except WorkerLost:
            self.error = None
            self._in_flight.clear()
            raise

    def look(self) -> None:
        if self.known_lost is not None:
            raise self.known_lost

    def recover(self, interrupted: Callable[[], bool]) -> bool:
        self.n_recovers += 1
        self.known_lost = None
        self.is_down.set()
        for _ in range(3000):
            if self.recoveries:
                what = self.recoveries.popleft()
                if isinstance(what, Exception):
                    raise what
                return what
            if interrupted():
                return False
            self.gate.acquire(timeout=0.01)
        raise AssertionError("nobody came")


def service_of(engine: FragileEngine, bound: RestartBound | None = None, max_queue: int = 100) -> Orca:
    config = ServingConfig(
        max_batch_size=4, n_slots=256, max_batch_tokens=64, block_size=8, max_queue=max_queue
    )
    kv = KVManager(n_blocks=32, block_size=8, n_rows=8, max_blocks_per_row=8)
    return Orca(engine, kv, config=config, model=MODEL, restarts=bound)


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
    assert len(again) == 1 and len(again[0]) == 2, "both ran again, with all their tokens"


def test_while_it_is_down_the_trouble_is_told_and_requests_are_taken_up_to_the_bound():
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
def test_past_the_bound_the_failure_is_final_and_says_why(restarts: int):
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
        with pytest.raises(EngineError, match="no more requests are taken: workers were lost"):
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
    told: list[str | None] = []
    recovery.on_trouble = told.append
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
    assert recovery.losses == 6
    assert told == [str(LOST), None] * 5 + [str(LOST)]


def test_the_longest_request_can_run_again():
    """Without its last token it is as long as `max_batch_tokens` allows, and another one runs beside it."""
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
    with pytest.raises(RequestTooLarge, match="max_batch_tokens allow 17"):
        service.pool.add(too_long)
    for request in (longest, behind):
        request.sink = Mailbox(None, lambda: None)
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
