"""Algorithm 1 of ORCA (4.2), lines 1 to 15: issue the next iteration, and take the tokens of the oldest.

Iteration-level scheduling, now known as continuous batching. `Scheduler.step` is one turn of the paper's
loop, and select.py is its function Select; comments give the paper's line numbers. The paper's initiation
phase is prefill, its increment phase decode. Scheduling is first come, first served at the level of
iterations: of two requests in the pool, the earlier one has run at least as many iterations.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from orca_jax.config import ServingConfig
from orca_jax.iteration.row import Row
from orca_jax.request.request import FinishReason, Request, RequestState, begin_iteration
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.scheduling.engine_protocol import Engine, Iteration, Returned, never
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.policy import Choice, OrcaPolicy, Policy, one_phase
from orca_jax.scheduling.prefix_lookup import publish_full_blocks, reserve_sharing
from orca_jax.scheduling.quarantine import Quarantine, Suspicion
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.select import Held, running_ahead, slots_to_reserve
from orca_jax.scheduling.serving_policy import ServingPolicy
from orca_jax.scheduling.timeline import Timeline

INITIATION, RUNNING, INCREMENT, FINISHED = RequestState

# Which requests may get rows: all, those that have begun, or none.
Gate = Literal["open", "begun", "shut"]


class Scheduler:
    """The loop of Algorithm 1 over a pool, an engine and a K/V manager. For one thread.

    Only the scheduler changes the state of requests and reserves slots for them; `n_rsrv` counts reserved
    slots. With overlap, one more batch is in flight than there are workers, so the host prepares an iteration
    while the previous one runs. A request may then end while an iteration for it is in flight. Its result is
    discarded; the request is `leaving`, and its slots, to which the iteration may write, are released when
    that returns. `policy` chooses the rows of each iteration; the default is Algorithm 1.

    `gate` is how the service brings the engine to rest: a request has begun if it is admitted, or has output
    from before a preemption. `weights_version` is the version of the weights that compute all new tokens.
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
        self.policy = self._configured_policy() if policy is None else policy
        self._on_demand = config.scheduling.on_demand
        self._caches = kv.prefixes is not None
        self._in_flight: deque[Iteration] = deque()  # line 1
        self.n_rsrv = 0  # line 2
        self.held: Held | None = None  # which request had to wait at the last choice, and why
        self.overlaps = config.overlap and engine.keeps_tokens
        self._most_in_flight = engine.n_workers + self.overlaps
        self.leaving: list[Request] = []  # ended, but still in a batch in flight
        self.gate: Gate = "open"
        self.weights_version = 0
        self.waiting_again: set[Request] = set()  # live, and without the slots they had
        self._quarantine = Quarantine()
        self.n_preemptions = self.n_recomputed = 0  # the latter: tokens computed again after preemptions
        self._initiated_last = False  # whether a deterministic engine's last batch was of initiations

    @property
    def n_scheduled(self) -> int:
        """Batches in flight."""
        return len(self._in_flight)

    def step(self) -> bool:
        """One turn of the loop (line 3); False if there was nothing to do because no request is live.

        Raises what the engine raises. Call `run_again` after WorkerLost, and `fail_all` after other errors.
        """
        activity = self.pool.activity()  # read before the pool, so that later arrivals interrupt the wait
        ended = self.end_cancelled()
        choice = self._next_rows()  # line 4
        self.timeline.interrupted(choice.preempted, "preempted")
        for req in choice.preempted:
            self.n_preemptions += 1
            req.n_dropped = req.n_computed
            self._preempt(req)
        rows, self.n_rsrv, self.held = choice.rows, choice.n_rsrv, choice.held
        if rows:  # an empty batch is never issued
            self._issue(choice)  # lines 5 to 8
        elif not self.n_scheduled:
            return ended or bool(choice.preempted)
        if self.n_scheduled == self._most_in_flight:  # line 9
            self._take_return(interrupted=never)  # lines 10 to 15
        elif not rows:  # a worker is free: also stop waiting when there may be something to select
            self._take_return(interrupted=lambda: self.pool.activity() != activity)
        return True

    def fail_all(self) -> None:
        """After an EngineError: drop all batches in flight, and end all live requests with reason `error`."""
        self._drop_in_flight()
        self.kv.forget()
        live = list(self.pool.in_arrival_order())
        self._deliver([self._end(req, FinishReason.ERROR) for req in live])

    def run_again(self, why: str = "a worker was lost") -> Suspicion:
        """After WorkerLost: drop the K/V cache and all batches in flight, and let the requests resume.

        The paper does not handle faults. Each admitted request returns to INITIATION and keeps its row,
        blocks and reservation, or with a prefix cache or blocks on demand waits again. Its next iteration
        recomputes the prompt and the output so far, and samples the same next token as without the loss.
        Tokens that were computed but not returned are recomputed. Requests that were asked to end are ended,
        as is a request that causes losses; its error quotes `why`.
        Returns the requests that were in flight.
        """
        suspicion = self._quarantine.record_loss({req for it in self._in_flight for req, _ in it.rows})
        self._drop_in_flight()
        ended: list[Delivery] = []
        for req in reversed(self.pool.admitted()):
            if req.ending is not None:
                ended.append(self._end(req, req.ending))
            elif req is suspicion.culprit:
                req.failure = f"a worker was lost {req.n_losses} times while this request ran, the last time "
                req.failure += f"while it ran alone, so it is not retried ({why})"
                ended.append(self._end(req, FinishReason.ERROR))
        self.compute_all_again()
        self._deliver(ended[::-1])
        return suspicion

    def begun(self) -> list[Request]:
        """The live requests that have begun, those that hold slots first."""
        waiting = [req for req in self.waiting_again if req.output_ids]
        return self.pool.admitted() + sorted(waiting, key=lambda req: (req.rank, req.arrival))

    def compute_all_again(self) -> None:
        """The K/V cache is lost while no batch is in flight: let all admitted requests compute it again."""
        assert not self._in_flight and not self.leaving
        self.kv.forget()
        for req in reversed(self.pool.admitted()):  # the oldest is the last to go to the queue's front
            # Blocks may be shared, or too few for all known tokens.
            if self._caches or self._on_demand or req.beams is not None:
                self._preempt(req)
            else:
                req.compute_again()

    def change_weights(self, version: int) -> None:
        """The engine has weights of this version from now on; while no batch is in flight.

        Begun requests keep their tokens, and compute all keys and values again: their next tokens depend on
        the new weights alone. No key or value of the old weights is found again.
        """
        self.weights_version = version
        self.kv.namespace = f"weights {version}"
        self.compute_all_again()
        for req in self.begun():
            req.block_hashes = None  # they have the old namespace
            req.use_weights(version)

    def end_cancelled(self) -> bool:
        """End requests that were cancelled or timed out; RUNNING ones end when they return.

        Returns whether any ended. `step` calls this first; call it directly while no steps are taken.
        """
        asked = self.pool.take_ending()
        if not asked:
            return False
        ended = [self._end(req, reason) for req, reason in asked if req.state is not RUNNING]
        self._deliver(ended)
        return bool(ended)

    def _configured_policy(self) -> Policy:
        if self.config.scheduling.policy == "orca":
            return OrcaPolicy.of(self.config)
        return ServingPolicy(self.config, self.kv, n_workers=self.engine.n_workers)

    def _next_rows(self) -> Choice:
        """Line 4. For a deterministic engine, only the rows of one phase; the phases alternate."""
        choice = Choice([], self.n_rsrv)
        if self.gate == "shut":
            return choice
        suspect = self._quarantine.next()
        if suspect is not None:
            return self._alone(suspect)
        if self.n_scheduled < self.engine.n_workers:
            choice = self._choose()
        # Only if no request is ready: these must first wait for their tokens in flight.
        if not (choice.rows or choice.preempted) and self.overlaps and self._in_flight:
            choice = self._choose(running_ahead(self._in_flight[0].rows))
        if not self.config.deterministic:
            return choice
        choice, self._initiated_last = one_phase(
            choice, self.n_rsrv, max_bs=self.config.max_batch_size, initiated_last=self._initiated_last
        )
        return choice

    def _alone(self, req: Request) -> Choice:
        """A row for this request only, once no other is in flight and it is ready; else no rows."""
        others_run = any(other is not req for it in self._in_flight for other, _ in it.rows)
        if others_run or (req.state is RUNNING and not (self.overlaps and running_ahead([(req, 1)]))):
            return Choice([], self.n_rsrv)
        other = next((other for other in self.pool.in_arrival_order() if other is not req), None)
        choice = self._choose([req], req)
        return choice if other is None else choice._replace(held=(other, "alone"))

    def _choose(self, ahead: Collection[Request] = (), alone: Request | None = None) -> Choice:
        pool: Iterable[Request] = self.pool.in_arrival_order() if self.gate == "open" else self.begun()
        return self.policy.choose(pool, self.n_rsrv, ahead, alone)

    def _issue(self, choice: Choice) -> None:
        """Allocate rows and blocks for the requests that line 26 reserved slots for, then lines 5 to 8."""
        rows, short, slots_of = choice.rows, choice.short, self.kv.slots_of
        if short is None:  # new requests, which have row -1 and so no slots, and those that need more blocks
            short = [(req, n) for req, n in rows if req.n_computed + n > slots_of[req.row]]
        self._admit([req for req, _ in short if req.row < 0], choice)
        if self._on_demand:
            for req, n_tokens in short:
                if req.beams is None:
                    self.kv.grow(req.row, req.n_computed + n_tokens)
        self.kv.copies = ()
        if self.kv.has_beams:
            self._continue_beams(rows)
        record = self.timeline.issued(rows)
        iteration = self.engine.issue(rows)  # line 5
        iteration.record = record
        partial, full = begin_iteration(rows)  # lines 6 and 7: every request of the batch is RUNNING
        if partial:
            iteration.partial = frozenset(partial)
        publish_full_blocks(full, self.kv)
        self._in_flight.append(iteration)  # line 8

    def _continue_beams(self, rows: Sequence[Row]) -> None:
        """Rows and blocks for the beams of each search. What they hold together is known only now."""
        copies: list[tuple[int, int]] = []
        for req, _ in rows:
            if req.beams is not None and not req.in_initiation:
                copies += self.kv.continue_beams(req.row, req.beams.parents, req.n_computed)
        self.kv.copies = copies
        self.n_rsrv = (self.kv.n_blocks - self.kv.n_free_blocks) * self.config.block_size

    def _admit(self, new: list[Request], choice: Choice) -> None:
        """Allocate a row and blocks for each of these requests."""
        self.pool.admit(new)
        if self.kv.prefixes is None:
            for req in new:
                req.row = self.kv.reserve(self._tokens_at_first(req), len(req.encoder_ids))
        else:
            reserve_sharing(new, map(self._tokens_at_first, new), choice.cached, self.kv)
        for req in new:
            if req.beams is not None:
                n_most = slots_to_reserve(req, self.config.block_size) // self.config.block_size
                self.kv.begin_beams(req.row, req.beams.width, None if self._on_demand else n_most)
            self._count_admission(req)

    def _tokens_at_first(self, req: Request) -> int:
        """The tokens that a request gets blocks for when it is admitted."""
        return req.n_tokens if self._on_demand or req.beams is not None else req.max_tokens

    def _count_admission(self, req: Request) -> None:
        """Count the tokens that are computed again after a preemption."""
        self.waiting_again.discard(req)
        req.use_weights(self.weights_version)
        if req.n_dropped:
            self.n_recomputed += max(0, req.n_dropped - req.n_computed)
            req.n_dropped = 0

    def _preempt(self, req: Request) -> None:
        """Let an admitted request, which is not in flight, wait again without slots."""
        req.n_preempted += 1
        req.n_found = 0
        req.compute_again()
        self._release(req)
        self.pool.preempt(req)
        self.waiting_again.add(req)

    def _take_return(self, interrupted: Callable[[], bool]) -> None:
        """Lines 10 to 15, unless the wait is interrupted. All tokens and ends are delivered in one call."""
        iteration = self._in_flight[0]
        returned = self.engine.wait(iteration, interrupted)  # line 10
        if returned is None:
            return
        assert iteration.record is not None
        self.timeline.returned(iteration.record)
        deliveries, leaving, overlaps = list[Delivery](), self.leaving, self.overlaps
        try:
            returned.give_prompts(iteration.rows)
            # The places of rows with more to take than a token, or with none.
            rare = iteration.partial if returned.has_only_tokens else range(len(iteration.rows))
            for i, ((req, _), token_id) in enumerate(zip(iteration.rows, returned.token_ids, strict=True)):
                req.n_in_flight = n_in_flight = req.n_in_flight - 1  # line 11
                if (rare and i in rare) or req.ending is not None or (leaving and req.state is FINISHED):
                    deliveries += self._take_row(iteration, returned, i)
                    continue
                # As in _take_token, without a call, for that is what most rows of most batches need.
                if not n_in_flight:
                    req.state = INCREMENT  # line 12
                reason = req.accept(token_id)
                if overlaps and req.n_computed >= req.full_at:  # else all tokens were known before
                    publish_full_blocks((req,), self.kv)
                if reason is not None:  # line 13
                    self._end(req, reason)  # line 14
                deliveries.append((req, token_id, reason))
        finally:  # even if a row raises: the users of the rows before it must learn of their tokens and ends
            self._deliver(deliveries)
        self._in_flight.popleft()  # line 15

    def _take_row(self, iteration: Iteration, returned: Returned, i: int) -> list[Delivery]:
        """Lines 12 to 14 for the request in place `i` of the returned batch, whatever came back for it."""
        req, _ = iteration.rows[i]
        if i in iteration.partial:
            return self._take_partial(req)
        if req.state is FINISHED:
            self._discard_result(req)
            return []
        if req.given_ids:
            return self._take_given(req, returned.given[i])
        beams = None if req.beams is None else returned.beams[i]
        return [self._take_token(req, returned.token_ids[i], returned.logprobs.get(i), beams)]

    def _take_partial(self, req: Request) -> list[Delivery]:
        """A chunk of the request's prompt is in the cache, and no token was sampled."""
        req.n_partial -= 1
        if req.state is FINISHED:
            self._discard_result(req)
        elif not req.n_in_flight:
            req.state = INITIATION
        return [] if req.state is FINISHED or req.ending is None else [self._end(req, req.ending)]

    def _take_token(
        self,
        req: Request,
        token_id: int,
        logprobs: TokenLogprobs | None = None,
        beams: Sequence[TokenLogprobs] | None = None,
    ) -> Delivery:
        """Lines 12 to 14 for one request of the returned batch; `beams` are the next tokens of a search."""
        if not req.n_in_flight:
            req.state = INCREMENT  # line 12
        if req.ending is not None:  # asked to end while it ran: discard the token
            return self._end(req, req.ending)
        if logprobs is not None:
            req.logprobs.append(logprobs)
        reason = req.accept(token_id) if beams is None else req.accept_candidates(beams)
        if req.n_computed >= req.full_at:
            publish_full_blocks((req,), self.kv)
        if reason is not None:  # line 13
            self._end(req, reason)  # line 14
        return req, token_id, reason

    def _take_given(self, req: Request, records: Sequence[TokenLogprobs]) -> list[Delivery]:
        """Lines 12 to 14 for the tokens of a given output that an iteration computed."""
        deliveries: list[Delivery] = []
        for record in records:
            deliveries.append(self._take_token(req, record.token_id, record))
            if req.state is FINISHED:
                break
        return deliveries

    def _discard_result(self, req: Request) -> None:
        if not req.n_in_flight:
            self.leaving.remove(req)
            self._release(req)

    def _end(self, req: Request, reason: FinishReason) -> Delivery:
        """End a request; every end goes through here. Its slots are released once no batch writes to them."""
        if req.n_in_flight:
            self.leaving.append(req)
        elif req.row >= 0:
            self._release(req)
        req.state = FINISHED
        req.finish_reason = reason
        self.pool.remove(req)
        self.waiting_again.discard(req)
        return req, None, reason

    def _release(self, req: Request) -> None:
        """Release the slots of a request that has ended."""
        self.n_rsrv -= self.kv.release(req.row) * self.config.block_size  # line 14
        req.row = -1

    def _drop_in_flight(self) -> None:
        """Forget all batches in flight: they will not return, and no longer write to the cache."""
        self._in_flight.clear()
        for req in self.leaving:
            req.n_in_flight = req.n_partial = 0
            self._release(req)
        self.leaving.clear()
        for req in self.pool.admitted():
            req.n_iterations -= req.n_in_flight  # lost iterations do not count
            req.n_in_flight = req.n_partial = 0

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        self.timeline.delivered(deliveries)
        self.pool.deliver(deliveries)
