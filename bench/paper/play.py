"""Plays a trace in real time: adds requests when they arrive, while a thread runs the scheduler's loop.

The loop is the same for ORCA's scheduler and for the baseline's, so that only the scheduler differs. Nothing
is sampled, and ends of sequences are ignored.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.paper.request_level import RequestLevelScheduler
from bench.paper.serving_records import ServingRecords
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.timeline import Timeline
from server.load.trace import Trace, TracedRequest

_LOOK_SECONDS = 0.05  # seconds between two checks of an idle loop whether to end


class TraceScheduler(Protocol):
    """The part of a scheduler that `play` uses; `Scheduler` and `RequestLevelScheduler` have it."""

    def step(self) -> bool:
        """Run one turn; return False when no request is live."""
        ...


MakeScheduler = Callable[[RequestPool, Timeline], TraceScheduler]


class NotPlayed(Exception):
    """A trace did not end in time."""


def play(
    trace: Trace,
    make_scheduler: MakeScheduler,
    *,
    deadline: float,
    check: Callable[[Request], None],
    bucket_sizes: Sequence[int] = (),
    on_finished: Callable[[int], object] = lambda n: None,
) -> ServingRecords:
    """Play `trace` from its start to the end of its last request.

    A request's latency counts from its planned arrival, even if this thread added it late. `check` is the
    pool's. The scheduler's thread calls `on_finished` with the number of ended requests. Raises NotPlayed
    after `deadline` seconds, and whatever `check`, the scheduler or its engine raises.
    """
    requests = [traced_request(i, traced) for i, traced in enumerate(trace)]
    start = time.perf_counter()
    timeline = Timeline(lambda: time.perf_counter() - start, max_records=None, bucket_sizes=bucket_sizes)

    def delivered(deliveries: Sequence[Delivery]) -> None:
        if n := sum(reason is not None for _, _, reason in deliveries):
            loop.n_left -= n
            on_finished(n)

    pool = RequestPool(
        max_waiting=len(trace), check=check, on_arrival=timeline.arrived, on_deliveries=delivered
    )
    scheduler = make_scheduler(pool, timeline)
    loop = _Loop(scheduler, pool, len(trace))
    at_once = sum(traced.arrival == 0 for traced in trace)
    for request in requests[:at_once]:  # all have arrived when the scheduler first looks
        pool.add(request)
    loop.start()
    try:
        for request, traced in zip(requests[at_once:], trace[at_once:], strict=True):
            _sleep_until(start + min(traced.arrival, deadline), loop)
            if loop.ended.is_set() or time.perf_counter() - start >= deadline:
                break
            pool.add(request)
        loop.ended.wait(max(0.0, start + deadline - time.perf_counter()))
    finally:
        loop.end()
    if len(timeline.requests) < len(trace):
        raise NotPlayed(f"{len(timeline.requests)} of {len(trace)} requests ended within {deadline:g} s")
    for record in timeline.requests:
        traced = trace[int(record.request_id)]
        assert record.n_output == traced.n_output, f"{record.n_output} tokens, not {traced.n_output}"
        record.arrived = traced.arrival
    rows = scheduler.iterations if isinstance(scheduler, RequestLevelScheduler) else ()
    return ServingRecords(list(timeline.requests), list(timeline.iterations), list(rows))


def traced_request(number: int, traced: TracedRequest) -> Request:
    """The request with this number in a trace: greedy, with the trace's output length."""
    sampling = SamplingParams(max_tokens=traced.n_output, temperature=0, ignore_eos=True)
    n_tokens = len(traced.prompt_ids) + traced.n_output
    return Request(str(number), traced.prompt_ids, n_tokens, sampling, seed=0)


class _Loop:
    """The thread of a scheduler; `ended` is set when no request is left (`n_left`), or when it failed."""

    def __init__(self, scheduler: TraceScheduler, pool: RequestPool, n_requests: int) -> None:
        self.n_left = n_requests
        self.ended = threading.Event()
        self._scheduler, self._pool = scheduler, pool
        self._stopping = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Stop within a turn. Raises what the scheduler raised, or NotPlayed if a turn does not end."""
        self._stopping = True
        self._thread.join(60)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise NotPlayed("an iteration did not return within 60 seconds")

    def _run(self) -> None:
        try:
            while self.n_left and not self._stopping:
                if not self._scheduler.step():
                    self._pool.wait_for_work(_LOOK_SECONDS)
        except Exception as error:
            self._failure = error
        finally:
            self.ended.set()


def _sleep_until(moment: float, loop: _Loop) -> None:
    """Sleep until a time of time.perf_counter, or until the loop has ended."""
    while (left := moment - time.perf_counter()) > 0 and not loop.ended.is_set():
        loop.ended.wait(left)
