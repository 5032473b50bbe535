"""Algorithm 1 of ORCA (4.2), lines 1 to 15: issue the next iteration, and take the tokens of the oldest.

`Scheduler.step` is one turn of the paper's loop, and select.py is its function Select; the paper's line
numbers stand beside the code. Together they keep iteration-level first-come-first-served: of two requests in
the pool the one that came earlier has run the same number of iterations or more.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from orca_jax.config import ServingConfig
from orca_jax.iteration.row import Row
from orca_jax.request.request import FinishReason, Request, RequestState
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.scheduling.engine_protocol import Engine, Iteration, never
from orca_jax.scheduling.kv_manager import KVManager, round_up
from orca_jax.scheduling.policy import OrcaPolicy, Policy
from orca_jax.scheduling.quarantine import Quarantine, Suspicion
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.select import may_run_ahead, running_ahead
from orca_jax.scheduling.timeline import Timeline

INITIATION, RUNNING, INCREMENT, FINISHED = RequestState


class Scheduler:
    """The loop of Algorithm 1 over a pool, an engine and a K/V manager; all on one thread.

    It alone changes the state of requests and reserves for them. `n_rsrv` counts reserved slots. With overlap
    one batch more is in flight than there are workers, so that the host prepares an iteration while the one
    before it runs. What is computed for a request that turned out finished is thrown away; it is `leaving`,
    and its slots come back with its last batch, which may write to them. The `policy` chooses the rows of
    each iteration; by default it is Algorithm 1's.
    """

    def __init__(
        self,
        pool: RequestPool,
        engine: Engine,
        kv: KVManager,
        *,
        config: ServingConfig,
        timeline: Timeline,
        policy: Policy | None = None,
    ) -> None:
        self.pool = pool
        self.engine = engine
        self.kv = kv
        self.config = config
        self.timeline = timeline
        self.policy = OrcaPolicy.of(config) if policy is None else policy
        self._in_flight: deque[Iteration] = deque()  # line 1
        self.n_rsrv = 0  # line 2
        self.overlaps = config.overlap and engine.keeps_tokens
        self._most_in_flight = engine.n_workers + self.overlaps
        self.leaving: list[Request] = []  # ended, and still in a batch in flight
        self._quarantine = Quarantine()
        self._began = False  # the last batch of a deterministic engine was one of initiations

    @property
    def n_scheduled(self) -> int:
        """Batches in flight."""
        return len(self._in_flight)

    def step(self) -> bool:
        """One turn of the loop (line 3); False when no request is live, so that there was nothing to do.

        Raises what the engine raises; `fail_all` is the way on from there, or `run_again` from WorkerLost.
        """
        seen = self.pool.activity()  # taken before the pool is looked at: what comes later interrupts
        ended = self.end_asked()
        rows, self.n_rsrv = self._next_rows()  # line 4
        if rows:  # an empty batch is never issued
            self._issue(rows)  # lines 5 to 8
        elif not self.n_scheduled:
            return ended
        if self.n_scheduled == self._most_in_flight:  # line 9
            self._take_return(interrupted=never)  # lines 10 to 15
        elif not rows:  # a worker is free: wait for something to select as well
            self._take_return(interrupted=lambda: self.pool.activity() != seen)
        return True

    def fail_all(self) -> None:
        """After an EngineError: what is in flight is lost, and all that is live ends with reason `error`."""
        self._lose_flights()
        live = list(self.pool.in_arrival_order())
        self._deliver([self._end(req, FinishReason.ERROR) for req in live])

    def run_again(self, why: str = "a worker was lost") -> Suspicion:
        """After WorkerLost: keys, values and what is in flight are lost, but no request is.

        The paper leaves faults out. Every admitted request goes back to INITIATION and keeps its row, blocks
        and reservation: its prompt and the output so far are the input of an iteration again, and the next
        token is the one that it would have been. A token that was computed but did not come back is computed
        again. What was asked to end ends, and so does a request that is to blame; `why` is the cause that it
        is told. Returns which requests were in flight.
        """
        suspicion = self._quarantine.take_loss({req for ran in self._in_flight for req, _ in ran.rows})
        self._lose_flights()
        ended: list[Delivery] = []
        for req in self.pool.admitted():
            if req.ending is not None:
                ended.append(self._end(req, req.ending))
            elif req is suspicion.guilty:
                req.failure = f"a worker was lost {req.n_losses} times while this request ran, the last time "
                req.failure += f"with no other request beside it, so it is not run again ({why})"
                ended.append(self._end(req, FinishReason.ERROR))
            else:
                req.state = INITIATION
                req.n_computed = 0
                if req.prompt_logprobs is not None and len(req.prompt_logprobs) < len(req.prompt_ids) - 1:
                    req.prompt_logprobs = None  # of a prompt in pieces: all of them come again
        self._deliver(ended)
        return suspicion

    def end_asked(self) -> bool:
        """End what was asked to end (cancelled, timeout); what is RUNNING ends when it returns.

        Whether any did. `step` begins with it; to be called where there are no steps.
        """
        asked = self.pool.take_ending()
        ended = [self._end(req, reason) for req, reason in asked if req.state is not RUNNING]
        self._deliver(ended)
        return bool(ended)

    def _next_rows(self) -> tuple[list[Row], int]:
        """Line 4. Of a deterministic engine the rows that are in one phase, each phase in its turn."""
        rows, n_rsrv = list[Row](), self.n_rsrv
        suspect = self._quarantine.next()
        if suspect is not None:
            return self._alone(suspect), n_rsrv
        if self.n_scheduled < self.engine.n_workers:
            rows, n_rsrv = self._choose(self.pool.in_arrival_order())
        # Behind all that can begin at once: these begin when their tokens are there.
        if not rows and self.overlaps and self._in_flight:
            rows, n_rsrv = self._choose(self.pool.in_arrival_order(), running_ahead(self._in_flight[0].rows))
        if not self.config.deterministic:
            return rows, n_rsrv
        first = [row for row in rows if row[0].in_initiation]
        later = [row for row in rows if not row[0].in_initiation]
        # Who begins first so was not before one that came earlier: that one has had an iteration.
        if first and not (later and self._began):
            self._began = True
            return first, n_rsrv
        self._began = False
        return later, self.n_rsrv

    def _alone(self, req: Request) -> list[Row]:
        """A row of this request alone, once no other is in flight and it is ready itself."""
        if any(other is not req for ran in self._in_flight for other, _ in ran.rows):
            return []
        ready = req.state is not RUNNING or (self.overlaps and may_run_ahead(req))
        return self._choose([req], [req])[0] if ready else []

    def _choose(self, pool: Iterable[Request], ahead: Collection[Request] = ()) -> tuple[list[Row], int]:
        return self.policy.choose(pool, self.n_rsrv, ahead)

    def _issue(self, rows: list[Row]) -> None:
        """Lines 5 to 8, and before them rows and blocks for the requests that line 26 reserved for."""
        new = [req for req, _ in rows if req.row < 0]
        self.pool.admit(new)
        for req in new:
            req.row = self.kv.reserve(req.max_tokens)
        record = self.timeline.issued(rows)
        iteration = self.engine.issue(rows)  # line 5
        iteration.record = record
        # Lines 6 and 7: every request of the batch is RUNNING.
        pieces = [i for i, (req, n_tokens) in enumerate(rows) if not req.begin_iteration(n_tokens)]
        if pieces:
            iteration.pieces = frozenset(pieces)
        self._in_flight.append(iteration)  # line 8

    def _take_return(self, interrupted: Callable[[], bool]) -> None:
        """Lines 10 to 15, unless the wait is interrupted; tokens and ends go out in one delivery."""
        iteration = self._in_flight[0]
        returned = self.engine.wait(iteration, interrupted)  # line 10
        if returned is None:
            return
        assert iteration.record is not None
        self.timeline.returned(iteration.record)
        deliveries: list[Delivery] = []
        try:
            for i, records in returned.prompt_logprobs.items():
                req, _ = iteration.rows[i]
                req.prompt_logprobs = [*(req.prompt_logprobs or ()), *records]
            pieces, logprobs = iteration.pieces, returned.logprobs
            pairs = zip(iteration.rows, returned.token_ids, strict=True)
            for i, ((req, _), token_id) in enumerate(pairs):  # line 11
                req.n_in_flight -= 1
                is_piece = pieces and i in pieces
                if is_piece:
                    req.n_pieces -= 1
                if req.state is FINISHED:  # computed for nothing
                    if not req.n_in_flight:
                        self.leaving.remove(req)
                        self._release(req)
                elif is_piece:
                    deliveries += self._take_piece(req)
                else:
                    own = logprobs.get(i) if logprobs else None
                    deliveries.append(self._take_token(req, token_id, own))  # lines 12 to 14
        finally:  # when a request's sink raises, those before it have still ended and must be told
            self._deliver(deliveries)
        self._in_flight.popleft()  # line 15

    def _take_piece(self, req: Request) -> list[Delivery]:
        """A piece of the request's prompt is in the cache, and nothing was sampled."""
        if not req.n_in_flight:
            req.state = INITIATION
        return [] if req.ending is None else [self._end(req, req.ending)]

    def _take_token(self, req: Request, token_id: int, logprobs: TokenLogprobs | None) -> Delivery:
        """Lines 12 to 14 for one request of a returned batch."""
        if not req.n_in_flight:
            req.state = INCREMENT  # line 12
        if req.ending is not None:  # asked to end while it ran: the token comes too late
            return self._end(req, req.ending)
        if logprobs is not None:
            req.logprobs.append(logprobs)
        reason = req.accept(token_id)
        if reason is not None:  # line 13
            self._end(req, reason)  # line 14
        return req, token_id, reason

    def _end(self, req: Request, reason: FinishReason) -> Delivery:
        """The one way out for every request; the slots it held come back as soon as nothing writes there."""
        if req.n_in_flight:
            self.leaving.append(req)
        elif req.row >= 0:
            self._release(req)
        req.state = FINISHED
        req.finish_reason = reason
        self.pool.remove(req)
        return req, None, reason

    def _release(self, req: Request) -> None:
        """The slots of a request that has ended can be reserved again."""
        self.n_rsrv -= round_up(req.max_tokens, self.config.block_size)  # line 14
        self.kv.release(req.row)
        req.row = -1

    def _lose_flights(self) -> None:
        """What was in flight will not come back, and writes nowhere any more."""
        self._in_flight.clear()
        for req in self.leaving:
            req.n_in_flight = req.n_pieces = 0
            self._release(req)
        self.leaving.clear()
        for req in self.pool.admitted():
            req.n_iterations -= req.n_in_flight  # the order counts iterations that came back, or will
            req.n_in_flight = req.n_pieces = 0

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        self.timeline.delivered(deliveries)
        self.pool.deliver(deliveries)
