"""Algorithm 1 of ORCA (4.2), lines 1 to 15: issue the next iteration, and take the tokens of the oldest.

Iteration-level scheduling, now known as continuous batching: the batch is chosen again before every
iteration, so a finished request leaves at once and a new one joins without waiting for the others.
`Scheduler.step` is one turn of the paper's loop, and select.py is its function Select; comments give the
paper's line numbers. The paper's initiation phase is prefill, its increment phase decode. Scheduling is first
come, first served at the level of iterations: of two requests in the pool, the earlier one has run at least
as many iterations.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

from orca_jax.config import ServingConfig
from orca_jax.request.request import (
    PLAIN,
    Accepted,
    FinishReason,
    Request,
    RequestState,
    RowAnswer,
    begin_iteration,
    by_kind,
)
from orca_jax.scheduling.adapter_slots import AdapterSlots
from orca_jax.scheduling.allocation import allocate, continue_beams, grow
from orca_jax.scheduling.engine_protocol import Engine, Iteration, never
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.policies import configured_policy
from orca_jax.scheduling.policy import Choice, Policy, one_phase
from orca_jax.scheduling.prefix_lookup import make_snapshots, publish_full_blocks, settle_drafts
from orca_jax.scheduling.quarantine import Quarantine
from orca_jax.scheduling.request_pool import Delivery, RequestPool
from orca_jax.scheduling.select import Held, running_ahead
from orca_jax.scheduling.timeline import Timeline

INITIATION, RUNNING, INCREMENT, FINISHED = RequestState

# Which requests may get rows: all, those that have begun, or none.
Gate = Literal["open", "begun", "shut"]


class Scheduler:
    """The loop of Algorithm 1 over a pool, an engine and a K/V manager. For one thread.

    Only the scheduler changes the state of requests and reserves slots for them; `n_rsrv` counts reserved
    slots. With overlap, one more batch is in flight than there are workers, so the host prepares an iteration
    while the previous one runs. A request may then end while an iteration for it is in flight. The result of
    that iteration is discarded. Until it returns the request is `leaving` and keeps its slots, because the
    iteration may write to them. `policy` chooses the rows of each iteration; by default the configured one.

    The service shuts `gate` to bring the engine to rest. A request has begun if it is admitted, or has output
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
        self.policy = policy or configured_policy(config, kv, n_workers=engine.n_workers)
        self._on_demand = config.scheduling.on_demand
        self.in_flight: deque[Iteration] = deque()  # line 1
        self.n_rsrv = 0  # line 2
        self.held: Held | None = None  # the request that the last iteration left waiting, and why
        self.overlaps = config.overlap and engine.keeps_tokens
        self._most_in_flight = engine.n_workers + self.overlaps
        self.leaving: list[Request] = []  # ended, but still in a batch in flight
        self.gate: Gate = "open"
        self.adapters: AdapterSlots | None = None  # set before the first request
        self.weights_version = 0
        self.waiting_again: set[Request] = set()  # preempted requests that wait
        self.quarantine = Quarantine()
        self.n_preemptions = self.n_recomputed = 0  # the latter: tokens computed again after preemptions
        self._initiated_last = False  # whether a deterministic engine's last batch was a prefill

    @property
    def n_scheduled(self) -> int:
        """Batches in flight."""
        return len(self.in_flight)

    def step(self) -> bool:
        """One turn of the loop (line 3); False if there was nothing to do because no request is live.

        Raises what the engine raises. See restart.py for what follows an error.
        """
        activity = self.pool.activity()  # read before the pool, so that later arrivals interrupt the wait
        ended = self.end_cancelled()
        if self.kv.arriving is not None and (begun := self.kv.arriving.step()):
            self._begin_with(begun)
        if self.kv.disk is not None:  # whose blocks may take the places that have become free
            self.kv.disk.step()
        choice = self._next_rows()  # line 4
        self.timeline.interrupted(choice.preempted, "preempted")
        for req in choice.preempted:
            self.n_preemptions += 1
            req.n_dropped = req.n_computed
            self.preempt(req)
        rows, self.n_rsrv, self.held = choice.rows, choice.n_rsrv, choice.held
        if rows:  # an empty batch is never issued
            self._issue(choice)  # lines 5 to 8
        elif not self.n_scheduled:
            return ended or bool(choice.preempted)
        if self.n_scheduled == self._most_in_flight or self._must_return_first():  # line 9
            self._take_return(interrupted=never)  # lines 10 to 15
        elif not rows:  # a worker is free: also stop waiting when there may be something to select
            self._take_return(interrupted=lambda: self.pool.activity() != activity)
        return True

    def begun(self) -> list[Request]:
        """The live requests that have begun, those that hold slots first."""
        waiting = [req for req in self.waiting_again if req.output_ids]
        return self.pool.admitted() + sorted(waiting, key=lambda req: (req.rank, req.arrival))

    def end_cancelled(self) -> bool:
        """End requests that were cancelled or timed out, or whose adapter cannot be read.

        RUNNING ones end when their batch returns.

        Returns whether any ended. `step` calls this first; call it directly while no steps are taken.
        """
        asked = self.pool.take_ending()
        ended = [self.end(req, reason) for req, reason in asked if req.state is not RUNNING]
        if self.adapters is not None:
            failed = self.adapters.take_failed(self.pool.in_arrival_order())
            ended += [self.end(req, FinishReason.ERROR) for req in failed]
        if ended:
            self.deliver(ended)
        return bool(ended)

    def _next_rows(self) -> Choice:
        """Line 4. For a deterministic engine, only the rows of one phase; the phases alternate."""
        choice = Choice([], self.n_rsrv)
        if self.gate == "shut":
            return choice
        suspect = self.quarantine.next()
        if suspect is not None:
            return self._alone(suspect)
        if self.n_scheduled < self.engine.n_workers:
            choice = self._choose()
        # Only if no request is ready: a request that runs ahead must wait for its token in flight.
        ahead = self.overlaps and self.in_flight and not self._must_return_first()
        if ahead and not (choice.rows or choice.preempted):
            choice = self._choose(running_ahead(self.in_flight[0].rows))
        if not self.config.deterministic:
            return choice
        drafts = self.kv.draft_states
        choice, self._initiated_last = one_phase(
            choice,
            self.n_rsrv,
            max_bs=self.config.max_batch_size,
            most_drafts=None if drafts is None else drafts.n_free,
            initiated_last=self._initiated_last,
        )
        return choice

    def _must_return_first(self) -> bool:
        """Whether nothing may run ahead of the only batch in flight.

        What is kept of drafts decides their request's next rows. The others of the batch wait with it,
        because two smaller batches would take longer than one.
        """
        if not self.overlaps or self.pool.all_plain or self.n_scheduled < self.engine.n_workers:
            return False
        rows = self.in_flight[0].rows
        has_room = len(rows) < self.config.max_batch_size
        return any(req.kind is not PLAIN and req.kind.holds_batch(req, has_room=has_room) for req, _ in rows)

    def _alone(self, req: Request) -> Choice:
        """Choose only this request, once no other is in flight and it is ready; until then no rows."""
        others_run = any(other is not req for it in self.in_flight for other, _ in it.rows)
        if others_run or (req.state is RUNNING and not (self.overlaps and running_ahead([(req, 1)]))):
            return Choice([], self.n_rsrv)
        other = next((other for other in self.pool.in_arrival_order() if other is not req), None)
        choice = self._choose([req], req)
        return choice if other is None else choice._replace(held=(other, "alone"))

    def _choose(self, ahead: Collection[Request] = (), alone: Request | None = None) -> Choice:
        pool: Iterable[Request] = self.pool.in_arrival_order() if self.gate == "open" else self.begun()
        if self.adapters is not None:
            if alone is None:
                pool = self.adapters.among(pool)
            elif not self.adapters.lets_run_alone(alone, self.pool.admitted()):
                return Choice([], self.n_rsrv)
        return self.policy.choose(pool, self.n_rsrv, ahead, alone)

    def _issue(self, choice: Choice) -> None:
        """Allocate rows and blocks for newly admitted requests (line 26), then issue (lines 5 to 8)."""
        rows = choice.rows
        short = rows if choice.short is None else choice.short
        new = [req for req, _ in short if req.row < 0]
        self.pool.admit(new)
        if self.kv.snapshots is not None:
            self.kv.snapshots.begin()
        for tier in self.kv.tiers:
            tier.begin()
        allocate(new, choice.cached, self.kv, on_demand=self._on_demand, read_in=choice.read_in)
        for req in new:
            self._count_admission(req)
        if self._on_demand:
            grow(short, self.kv)
        self.kv.copies = ()
        if self.kv.beams:
            self.kv.copies = continue_beams(rows, self.kv)
            self.n_rsrv = (self.kv.n_blocks - self.kv.n_free_blocks) * self.config.block_size
        if self.kv.snapshots is not None or self.kv.draft_states is not None:
            make_snapshots(rows, self.kv)
        record = self.timeline.issued(rows)
        iteration = self.engine.issue(rows)  # line 5
        iteration.record = record
        partial, full = begin_iteration(rows)  # lines 6 and 7: every request of the batch is RUNNING
        if partial:
            iteration.partial = frozenset(partial)
        publish_full_blocks(full, self.kv)
        self.in_flight.append(iteration)  # line 8
        if self.kv.leases is not None and (offered := self.kv.leases.offer(rows)):
            self.deliver([(req, 0, None) for req in offered])

    def _begin_with(self, begun: Sequence[tuple[Request, int]]) -> None:
        """Let waiting requests begin with the tokens that another server sampled after their prompts.

        That server has counted them, so they are delivered as no tokens of this one.
        """
        deliveries = list[Delivery]()
        for req, token_id in begun:
            reason = req.accept(token_id)
            deliveries.append((req, 0, None) if reason is None else self.end(req, reason))
        self.deliver(deliveries)

    def _count_admission(self, req: Request) -> None:
        """Count the tokens that are computed again after a preemption."""
        self.waiting_again.discard(req)
        req.use_weights(self.weights_version)
        if req.n_dropped:
            self.n_recomputed += max(0, req.n_dropped - req.n_computed)
            req.n_dropped = 0

    def preempt(self, req: Request) -> None:
        """Take the slots of an admitted request that is not in flight, and let it wait again."""
        req.n_preempted += 1
        req.n_found = 0
        req.compute_again()
        self.release(req)
        self.pool.preempt(req)
        self.waiting_again.add(req)

    def _take_return(self, interrupted: Callable[[], bool]) -> None:
        """Lines 10 to 15, unless the wait is interrupted. All tokens and ends are delivered in one call."""
        iteration = self.in_flight[0]
        returned = self.engine.wait(iteration, interrupted)  # line 10
        if returned is None:
            return
        assert iteration.record is not None
        self.timeline.returned(iteration.record)
        deliveries, leaving, overlaps = list[Delivery](), self.leaving, self.overlaps
        try:
            returned.give_prompts(iteration.rows)
            accepted = self._accepted(iteration, returned.answers) if returned.answers else {}
            partial = iteration.partial  # rows of prompt chunks, which sample no token
            some_without = bool(partial or leaving)  # tested for each row
            for i, ((req, _), token_id) in enumerate(zip(iteration.rows, returned.token_ids, strict=True)):
                req.n_in_flight = n_in_flight = req.n_in_flight - 1  # line 11
                several = accepted.get(i) if accepted else None
                if several is None and (
                    req.ending is not None or (some_without and (i in partial or req.state is FINISHED))
                ):
                    self._take_row_without_tokens(req, deliveries, partial=i in partial)
                    continue
                if not n_in_flight:
                    req.state = INCREMENT  # line 12
                if several is None:
                    reason = req.accept(token_id)
                    deliveries.append((req, 1, reason))
                    # Without overlap `_issue` has published this block.
                    if overlaps and req.n_computed >= req.full_at:
                        publish_full_blocks((req,), self.kv)
                else:
                    token_ids, reason = several
                    deliveries.append((req, len(token_ids), reason))
                if reason is not None:  # line 13
                    self.end(req, reason)  # line 14
        finally:  # even if a row raises: users of the rows before it must get their tokens and ends
            self.deliver(deliveries)
        self.in_flight.popleft()  # line 15

    def _accepted(self, iteration: Iteration, answers: Mapping[int, RowAnswer]) -> dict[int, Accepted]:
        """Let the requests that go on take their answers, by place in the batch, and publish their blocks."""
        rows, partial, kv = iteration.rows, iteration.partial, self.kv
        going = {
            i: answer
            for i, answer in answers.items()
            if (req := rows[i][0]).ending is None and req.state is not FINISHED
        }
        if partial:
            going = {i: answer for i, answer in going.items() if i not in partial}
        requests, given = [rows[i][0] for i in going], list(going.values())
        accepted = list[Accepted]()
        for cls, some in by_kind(requests):
            accepted += cls.accept_all(requests[some], given[some])
        if kv.draft_states is not None:
            for req in requests:
                settle_drafts(req, kv)
        publish_full_blocks([req for req in requests if req.n_computed >= req.full_at], kv)
        return dict(zip(going, accepted, strict=True))

    def _take_row_without_tokens(self, req: Request, deliveries: list[Delivery], *, partial: bool) -> None:
        """Lines 12 to 14 for a `partial` prompt chunk, and for a request that has ended or is asked to."""
        if partial:
            req.n_partial -= 1
        if req.state is FINISHED:  # it ended while the batch ran: discard the result
            if not req.n_in_flight:
                self.leaving.remove(req)
                self.release(req)
            return
        if not req.n_in_flight:
            req.state = INITIATION if partial else INCREMENT  # line 12
        if req.ending is not None:
            deliveries.append(self.end(req, req.ending))

    def end(self, req: Request, reason: FinishReason) -> Delivery:
        """End a request, whatever the reason. Its slots are released once no batch writes to them."""
        has_output = reason is FinishReason.STOP or reason is FinishReason.LENGTH
        if req.kv_transfer is not None and self.kv.leases is not None:
            self.kv.leases.grant(req, reason)
        if req.n_in_flight:
            self.leaving.append(req)
        elif req.row >= 0:
            self.release(req)
        req.state = FINISHED
        req.finish_reason = reason
        if has_output:
            req.kind.end(req)
        self.pool.remove(req)
        self.waiting_again.discard(req)
        return req, 0, reason

    def release(self, req: Request) -> None:
        """Release the slots of a request that has ended."""
        self.n_rsrv -= self.kv.release(req.row) * self.config.block_size  # line 14
        req.row = -1

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        self.timeline.delivered(deliveries)
        self.pool.deliver(deliveries)
