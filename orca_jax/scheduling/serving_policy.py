"""The default policy: chunked prefill, blocks on demand and a prefix cache, each of which can be turned off.

Sources: iteration-level scheduling, ORCA; blocks on demand and preemption, PagedAttention (Kwon et al., SOSP
2023); decodes first and chunked prefill, Sarathi-Serve (Agrawal et al., OSDI 2024); the prefix cache, SGLang
(Zheng et al., 2024). docs/scheduling.md has the promise and the price of each.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import mul

from orca_jax.config import ServingConfig
from orca_jax.iteration.shape import serving_buckets
from orca_jax.request.request import PLAIN, Request, RequestState, Row, by_kind
from orca_jax.scheduling.blocks import round_up
from orca_jax.scheduling.cache_kinds import blocks_at_first, slots_to_reserve
from orca_jax.scheduling.draft_depth import Worth, draft_together, likeliest
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.policy import Choice
from orca_jax.scheduling.prefix_lookup import (
    LongestPrefixFirst,
    awaits_blocks,
    awaits_transfer,
    cached_blocks,
    coming_hash,
    host_blocks,
    is_coming,
    next_block_hash,
    next_border,
)
from orca_jax.scheduling.request_pool import InArrivalOrder, split
from orca_jax.scheduling.select import Held, Why

_RUNNING, _INCREMENT = RequestState.RUNNING, RequestState.INCREMENT
_WINDOW = 16  # the number of waiting requests among which the longest cached prefix goes first
_WATERMARK = 0.01  # the fraction of all blocks that admission on demand leaves free for requests that grow


@dataclass(slots=True)
class _Plan:
    """A choice in the making.

    `free` counts the blocks left; below 0, blocks are owed to requests that must grow. `held_back` has
    requests in flight that will be preempted when they return, and `coming` counts their blocks. `taken`
    counts the blocks that the rows take, `n_places` the used places of the batch. `held` and `short` are as
    in Choice.
    """

    free: int
    coming: int = 0
    taken: int = 0
    n_places: int = 0
    rows: list[Row] = field(default_factory=list[Row])
    preempted: dict[Request, None] = field(default_factory=dict[Request, None])  # in order
    held_back: set[Request] = field(default_factory=set[Request])
    cached: dict[Request, list[int]] = field(default_factory=dict[Request, list[int]])
    revived: set[int] = field(default_factory=set[int])  # all blocks in `cached`
    read_in: dict[Request, int] = field(default_factory=dict[Request, int])  # blocks, from the host tier
    held: Held | None = None
    short: list[Row] | None = None
    all_decode: bool = False  # whether no admitted request is in its initiation

    def add(self, req: Request, n_tokens: int) -> None:
        self.rows.append((req, n_tokens))
        self.n_places += req.kind.n_rows

    def hold(self, req: Request, why: Why) -> None:
        """Note that a request has to wait. Only the first one counts."""
        self.held = self.held or (req, why)

    def gives_up(self, req: Request) -> bool:
        """Whether the request must not run in this iteration."""
        return req in self.preempted or req in self.held_back

    def make_room(self, n_blocks: int, victims: Iterable[Request], kv: KVManager) -> bool:
        """Take `n_blocks`, from `victims` if too few are free; False if they are not available this turn.

        In that case they are kept for the request that needs them.
        """
        for victim in victims:
            if n_blocks <= self.free + self.coming:
                break
            self.drop(victim, kv)
        self.free -= n_blocks
        if self.free < 0:
            return False
        self.taken += n_blocks
        return True

    def drop(self, victim: Request, kv: KVManager) -> None:
        """Preempt a request. If it is in flight, hold it back until it returns.

        While one is held back, so are further ones: no request waits while a later one goes on.
        """
        before = [req.row for req in self.preempted]
        n_before = kv.n_released(before)
        if victim.n_in_flight or self.held_back:
            self.held_back.add(victim)
        else:
            self.preempted[victim] = None
            before.append(victim.row)
            n_freed = kv.n_released(before) - n_before
            self.free += n_freed
            self.taken -= n_freed
            n_before += n_freed
        self.coming = kv.n_released([*before, *(req.row for req in self.held_back)]) - n_before


class _Waiting:
    """The waiting requests, read lazily and kept, so that they may be iterated several times."""

    def __init__(self, unread: Iterator[Request]) -> None:
        self.seen: list[Request] = []
        self._unread = unread

    def __iter__(self) -> Iterator[Request]:
        yield from self.seen
        for req in self._unread:
            self.seen.append(req)
            yield req


class ServingPolicy:
    """Chooses decodes first, then begun prompts, then waiting requests, each group in service order.

    The first request in order always advances, because later ones make room for it. A waiting request is
    admitted only after all before it. At most `max_batch_size` requests are admitted for each of the
    `n_workers` batches that may be in flight. For the scheduler's thread.

    A subclass may override `order`, and `gives_way` so that waiting requests preempt admitted ones.
    """

    def __init__(self, config: ServingConfig, kv: KVManager, *, n_workers: int) -> None:
        scheduling = config.scheduling
        self._kv = kv
        self._max_bs = config.max_batch_size
        self._max_admitted = config.max_batch_size * n_workers
        self._max_tokens = config.max_batch_tokens
        self._chunked = scheduling.chunked_prefill
        self._prefill_tokens = scheduling.prefill_tokens or config.max_batch_tokens
        self._buckets = serving_buckets(config)
        self._costs = config.iteration_costs or (1.0,) * len(self._buckets)
        self._on_demand = scheduling.on_demand
        self._fills = not config.deterministic  # else `one_phase` fills the places, once it knows the rows
        cls = type(self)
        self._reorders = cls.order is not ServingPolicy.order
        self._preempts = scheduling.on_demand and (
            scheduling.scheduling_policy == "priority" or cls.gives_way is not ServingPolicy.gives_way
        )
        self._by_prefix = (
            LongestPrefixFirst(_WINDOW, kv) if scheduling.scheduling_policy == "longest-prefix" else None
        )
        self._watermark = math.ceil(_WATERMARK * kv.n_blocks) if scheduling.on_demand else 0
        self._were_prompts_alone = False  # the last batch had only prompts although others could decode

    def order(self, req: Request) -> tuple[float, ...]:
        """The place of a request among others, smaller first: by its rank in the queue, then by arrival.

        A subclass's order also replaces the queue's. It may change from turn to turn; no two requests may be
        equal, so end it with `req.arrival`. All waiting requests are then sorted in every turn.
        """
        return req.rank, req.arrival

    def gives_way(self, admitted: Request, waiting: Request) -> bool:
        """Whether an admitted request is preempted for a waiting one that goes before it in order.

        That happens only with blocks on demand, if the waiting one could not be admitted otherwise.
        """
        return admitted.priority > waiting.priority

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        admitted, unread = split(pool)
        decodes, prompts = [req for req in admitted if req.state is _INCREMENT], list[Request]()
        if len(decodes) < len(admitted):
            decodes, prompts = _by_phase(admitted, ahead)
        if self._reorders:
            unread = iter(sorted(unread, key=self.order))
        elif self._by_prefix is not None:
            unread = self._by_prefix.order(unread)
        waiting = _Waiting(unread)
        if alone is not None:
            return self._choice(self._plan_alone(alone, admitted))
        plan = _Plan(self._kv.n_free_blocks, all_decode=len(decodes) == len(admitted))
        if self._preempts:
            for first in waiting:
                if awaits_transfer(first, self._kv):
                    continue
                self._make_way(plan, first, admitted)
                break
            decodes = [req for req in decodes if not plan.gives_up(req)]
        self._add_decodes(plan, decodes, admitted)
        n_decodes = len(plan.rows)
        others_decode = n_decodes > 0 or any(not req.in_initiation for req in admitted)
        fits = self._add_prompts(plan, prompts, admitted, waiting, others_decode=others_decode)
        if fits or self._were_prompts_alone or len(plan.rows) > n_decodes or plan.preempted:
            if plan.rows:
                self._were_prompts_alone = False
        else:  # a whole prompt does not fit with the decodes: it goes now, and they go next
            prompts_alone = _Plan(plan.free)
            self._add_prompts(prompts_alone, prompts, admitted, waiting, others_decode=False)
            if prompts_alone.rows:
                self._were_prompts_alone = True
                plan = prompts_alone
        if self._fills and not (isinstance(pool, InArrivalOrder) and pool.all_plain):
            self._fill_places(plan)
        return self._choice(plan)

    def _choice(self, plan: _Plan) -> Choice:
        n_held = self._kv.n_blocks - self._kv.n_free_blocks + plan.taken
        n_rsrv = n_held * self._kv.block_size
        return Choice(plan.rows, n_rsrv, plan.preempted, plan.cached, plan.held, plan.short, plan.read_in)

    def _plan_alone(self, req: Request, admitted: Sequence[Request]) -> _Plan:
        """Choose only this request. The others, none of which is in flight, make room for it."""
        plan = _Plan(self._kv.n_free_blocks)
        others = [other for other in reversed(admitted) if other is not req]
        n_tokens = min(req.n_to_compute, self._max_tokens)
        if req.kind.forks and not req.in_initiation:
            has_room = plan.make_room(self._n_to_grow(req), others, self._kv)
        elif req.row >= 0:
            n_new = self._kv.n_blocks_for(req.n_computed + n_tokens) - self._kv.n_blocks_for(
                self._kv.slots_of[req.row]
            )
            has_room = plan.make_room(max(0, n_new), others, self._kv)
        else:
            has_room = plan.make_room(self._blocks_to_reserve(req), others, self._kv)
            n_rows = self._kv.n_free_rows + self._n_places(plan.preempted)
            for other in others:
                if n_rows < req.kind.n_rows and other not in plan.preempted:
                    plan.drop(other, self._kv)
                    n_rows += other.kind.n_rows
        assert has_room, "the request alone needs more blocks than there are"
        plan.add(req, n_tokens)
        return plan

    def _fill_places(self, plan: _Plan) -> None:
        """Let increments that can compute several tokens use the places, tokens and blocks left."""
        if plan.n_places >= self._max_bs:
            return
        n_planned = sum([n for _, n in plan.rows])
        n_left = min(self._max_bs - plan.n_places, self._max_tokens - n_planned)
        if n_left <= 0:
            return
        rows = plan.rows
        # Request.in_initiation, inlined for speed.
        several = [
            i
            for i, (req, _) in enumerate(rows)
            if req.kind is not PLAIN and (req.state is _INCREMENT or req.n_in_flight != req.n_partial)
        ]
        drafted = [rows[i][0] for i in several]
        groups = by_kind(drafted)
        chances = [chance for cls, some in groups for chance in cls.chances(drafted[some])]
        if 1.0 in chances:  # not drafts, but tokens that will be kept
            for i, req, chance in zip(several, drafted, chances, strict=True):
                if chance == 1.0:
                    n_more = min(n_left, req.kind.most_tokens([req])[0] - rows[i][1])
                    n_more = self._extend(plan, i, n_more)
                    n_planned += n_more
                    n_left -= n_more
            several = [i for i, chance in zip(several, chances, strict=True) if chance < 1.0]
            drafted = [rows[i][0] for i in several]
            groups = by_kind(drafted)
            chances = [chance for chance in chances if chance < 1.0]
        if self._kv.draft_states is not None:
            n_left = min(n_left, self._kv.draft_states.n_free)
        if not drafted or n_left <= 0:
            return
        if not self._may_be_worth_their_time(n_planned, max(chances), n_left):
            return  # whatever is drafted
        if drafted[0].kind.shared_drafter is not None:
            draft_together(list(zip(drafted, chances, strict=True)), n_left, self._worth(n_planned))
        counts = [n - 1 for cls, some in groups for n in cls.most_tokens(drafted[some])]
        if not self._are_worth_their_time(n_planned, counts, chances, n_left):
            each = [p**j for p, n in zip(chances, counts, strict=True) for j in range(1, n + 1)]
            each.sort(reverse=True)
            n_drafts = self._n_worth_their_time(n_planned, each[:n_left])
            if n_drafts < len(each):
                wanting = list(zip(several, chances, counts, strict=True))
                some_counts = dict(likeliest(wanting, self._max_bs, n_drafts)[0])
                counts = [some_counts.get(i, 0) for i in several]
        slots_of = self._kv.slots_of
        for i, req, n_more in zip(several, drafted, counts, strict=True):
            n_tokens = rows[i][1] + n_more
            if req.n_computed + n_tokens <= slots_of[req.row]:
                rows[i] = req, n_tokens
            elif n_more:
                self._extend(plan, i, n_more)

    def _may_be_worth_their_time(self, n_planned: int, chance: float, n_left: int) -> bool:
        """Whether any number of up to `n_left` drafts may be, none of which has a better chance."""
        first, last = (bisect_left(self._buckets, n) for n in (n_planned, n_planned + n_left))
        if self._buckets[first] > n_planned:
            return True
        without = n_planned / self._costs[first]
        costs = zip(self._buckets[first + 1 : last + 1], self._costs[first + 1 : last + 1], strict=True)
        return any(
            n_planned + chance * min(size - n_planned, n_left) > without * cost for size, cost in costs
        )

    def _are_worth_their_time(
        self, n_planned: int, counts: Sequence[int], chances: Sequence[float], n_left: int
    ) -> bool:
        """Whether all of these drafts surely are; quicker than `_n_worth_their_time`, which orders them."""
        n_drafts = sum(counts)
        if n_drafts > n_left:
            return False
        if not n_drafts:
            return True
        # At least this number is kept: as if all drafts had the mean chance p and stood in rows of n, the
        # most of any request. For p + p^2 + ... + p^n is convex in p, and each draft adds less than the last.
        n, p = max(counts), sum(map(mul, chances, counts)) / n_drafts
        n_kept = n_drafts / n * p * (1 - p**n) / (1 - p)
        first = bisect_left(self._buckets, n_planned)
        last = bisect_left(self._buckets, n_planned + n_drafts)
        worth, most = (n_planned + n_kept) / self._costs[last], max(chances)
        return all(
            n_planned + most * (size - n_planned) <= worth * cost
            for size, cost in zip(self._buckets[first:last], self._costs[first:last], strict=True)
        )

    def _worth(self, n_planned: int) -> Worth:
        """The worth of drafts for an iteration that has `n_planned` tokens without them."""

        def worth(chances: Sequence[float], more: float) -> float:
            cost = self._costs[bisect_left(self._buckets, n_planned + len(chances))]
            return (n_planned + sum(chances)) / (cost + more)

        return worth

    def _n_worth_their_time(self, n_planned: int, chances: Sequence[float]) -> int:
        """The number of drafts, likeliest first, with which an iteration yields the most tokens in its time.

        `chances` descend. Without drafts the iteration has `n_planned` tokens, and n drafts are worth it only
        if (tokens + their chances' sum) / tokens is above the ratio of the iterations' times. So drafts that
        fit into the bucket are free, and more are taken while the device waits for its memory, but none where
        arithmetic takes the time.
        """
        first = bisect_left(self._buckets, n_planned)
        best, n_best = 0.0, 0
        n_tokens, n_taken = float(n_planned), 0
        for size, cost in zip(self._buckets[first:], self._costs[first:], strict=True):
            n_fitting = min(size - n_planned, len(chances))
            n_tokens += sum(chances[n_taken:n_fitting])
            n_taken = n_fitting
            if n_tokens / cost > best:
                best, n_best = n_tokens / cost, n_taken
            if n_taken == len(chances):
                break
        return n_best

    def _extend(self, plan: _Plan, i: int, n_more: int) -> int:
        """Add up to `n_more` tokens to row `i`, as far as its blocks and free ones hold them; how many."""
        kv, size = self._kv, self._kv.block_size
        req, n_tokens = plan.rows[i]
        end, n_held = req.n_computed + n_tokens, kv.slots_of[req.row]
        if end + n_more <= n_held:
            plan.rows[i] = req, n_tokens + n_more
            return n_more
        n_slots = max(n_held, round_up(end, size))  # once the row has what it needs
        n_wanted = kv.n_blocks_for(end + n_more) - n_slots // size
        n_new = max(0, min(n_wanted, plan.free - self._watermark))
        n_more = min(n_more, n_slots + n_new * size - end)
        plan.free -= n_new
        plan.taken += n_new
        plan.rows[i] = req, n_tokens + n_more
        if plan.short is not None and end + n_more > n_held:
            plan.short.append(plan.rows[i])  # perhaps after a row of fewer tokens, which grows first
        return n_more

    # Decodes.

    def _add_decodes(self, plan: _Plan, decodes: Sequence[Request], admitted: Sequence[Request]) -> None:
        """Add a row for each decode. One that needs another block may take it from later requests."""
        slots_of = self._kv.slots_of
        short: list[Row] | None = None
        if self._kv.beams:
            decodes = self._that_fit(decodes)
            n_new = sum(map(self._n_to_grow, decodes))
        else:
            if len(decodes) > self._max_bs:
                decodes = sorted(decodes, key=self.order)[: self._max_bs]
            short = [(req, 1) for req in decodes if req.n_computed >= slots_of[req.row]]
            n_new = len(short)
        if n_new <= plan.free:
            plan.free -= n_new
            plan.taken += n_new
            plan.short = short
            plan.rows = list(zip(decodes, repeat(1)))
            plan.n_places = self._n_places(decodes)
            return
        order = sorted(admitted, key=self.order)
        place = {req: i for i, req in enumerate(order)}
        for req in sorted(decodes, key=self.order):
            if plan.gives_up(req):
                continue
            n_new = self._n_to_grow(req)
            if n_new:
                later = (other for other in reversed(order[place[req] + 1 :]) if not plan.gives_up(other))
                if not plan.make_room(n_new, later, self._kv):
                    plan.hold(req, "slots")
                    continue
            plan.add(req, 1)

    def _that_fit(self, decodes: Sequence[Request]) -> list[Request]:
        """The first decodes in order that fit in the batch. Later requests may go past a beam search."""
        fitting: list[Request] = []
        n_left = self._max_bs
        for req in sorted(decodes, key=self.order):
            if req.kind.n_rows <= n_left:
                fitting.append(req)
                n_left -= req.kind.n_rows
        return fitting

    def _n_to_grow(self, req: Request) -> int:
        """The blocks that a request's next decode takes."""
        if not req.kind.forks:
            return int(req.n_computed >= self._kv.slots_of[req.row])
        return self._kv.beams.n_to_grow(req.row, len(req.kind.parents), req.n_computed)

    def _n_places(self, requests: Collection[Request]) -> int:
        return sum(req.kind.n_rows for req in requests) if self._kv.beams else len(requests)

    # Prompts.

    def _add_prompts(
        self,
        plan: _Plan,
        begun: Sequence[Request],
        admitted: Sequence[Request],
        waiting: Iterable[Request],
        *,
        others_decode: bool,
    ) -> bool:
        """Add begun prompts, then waiting ones; False if the next prompt has more tokens than fit."""
        room = self._max_tokens - plan.n_places
        if self._chunked and others_decode:
            room = self._without_padding(plan.n_places, min(room, self._prefill_tokens))
        for req in sorted(begun, key=self.order):
            if plan.gives_up(req):
                continue
            if plan.n_places + req.kind.n_rows > self._max_bs:
                plan.hold(req, "batch")
                return True
            room -= req.n_to_encode
            n_tokens = self._n_tokens(req, req.n_computed, req.n_to_compute, room)
            if not n_tokens:
                plan.hold(req, "tokens")
                return False
            plan.add(req, n_tokens)
            room -= n_tokens
        if plan.free <= 0 or plan.preempted or plan.held_back:
            for first in chain(plan.preempted, waiting):
                plan.hold(first, "slots")
                break
            return True
        return self._admit(plan, room, admitted, waiting)

    def _without_padding(self, n_rows: int, room: int) -> int:
        """Reduce `room` so that the iteration fills a bucket, unless that halves it.

        The end of a chunk is free to choose, and padding up to the next bucket would be computed for nothing.
        """
        i = bisect_right(self._buckets, n_rows + room) - 1
        fitted = self._buckets[i] - n_rows
        return fitted if 2 * fitted > room else room

    def _admit(self, plan: _Plan, room: int, admitted: Sequence[Request], waiting: Iterable[Request]) -> bool:
        """Admit waiting requests in order; False if the next one has more tokens than fit."""
        kv = self._kv
        coming: set[bytes | None] | None = None
        n_admitted, n_free_rows = self._n_places(admitted), kv.n_free_rows
        for req in waiting:
            if awaits_transfer(req, kv):
                plan.hold(req, "transfer")  # later requests go past it: its blocks come from elsewhere
                continue
            most = min(self._max_bs - plan.n_places, self._max_admitted - n_admitted, n_free_rows)
            if req.kind.n_rows > most:
                plan.hold(req, "batch")
                return True
            cached = cached_blocks(req, kv)
            if coming is None:
                # Request.in_initiation, inlined for speed.
                coming = {
                    self._coming(other, other.n_computed)
                    for other in (() if plan.all_decode else admitted)
                    if other.state is not _INCREMENT and other.n_in_flight == other.n_partial
                }
            n_read = host_blocks(req, len(cached), kv)
            if is_coming(req, len(cached), coming, kv) or (
                n_read and is_coming(req, len(cached) + n_read, coming, kv)
            ):
                plan.hold(req, "prefix")
                # Another request computes this block now, or reads it in; in the next iteration it is cached.
                return True
            if awaits_blocks(req, len(cached) + n_read, kv):
                plan.hold(req, "disk")
                return True
            n_cached = (len(cached) + n_read) * kv.block_size
            n_tokens = self._n_tokens(req, n_cached, req.n_tokens - n_cached, room - req.n_to_encode)
            if not n_tokens:
                plan.hold(req, "tokens")
                return not room
            n_new = self._n_new_blocks(req, cached, plan.revived)
            if n_new + (self._watermark if n_admitted else 0) > plan.free:
                plan.hold(req, "slots")
                return True
            plan.free -= n_new
            plan.taken += n_new
            plan.cached[req] = cached
            if n_read:
                plan.read_in[req] = n_read
                coming.add(next_block_hash(req, len(cached), kv))
            plan.revived.update(cached)
            plan.add(req, n_tokens)
            if plan.short is not None:
                plan.short.append((req, n_tokens))
            coming.add(self._coming(req, n_cached))
            room -= n_tokens + req.n_to_encode
            n_admitted += req.kind.n_rows
            n_free_rows -= req.kind.n_rows
        return True

    def _coming(self, req: Request, n_computed: int) -> bytes | None:
        """The hash of the block that others can begin after once this prompt's next piece is computed."""
        if self._kv.snapshots is not None and not self._chunked:  # no piece ends at a border
            return None
        return coming_hash(req, n_computed, self._kv)

    def _make_way(self, plan: _Plan, req: Request, admitted: Sequence[Request]) -> None:
        """Let admitted requests that give way make room for a waiting one, if they hold enough.

        Requests that precede it in order because they waited longer are spared: they would be admitted again
        before it.
        """
        after = [other for other in admitted if self.order(other) > self.order(req)]
        lower = sorted((other for other in after if self.gives_way(other, req)), key=self.order)
        if not lower:
            return
        n_new = self._n_new_blocks(req, cached_blocks(req, self._kv), ()) + self._watermark
        n_rows = min(self._max_admitted - self._n_places(admitted), self._kv.n_free_rows)
        victims: list[Request] = []
        n_freed = 0
        while lower and (n_new > plan.free + n_freed or n_rows < req.kind.n_rows):
            victims.append(lower.pop())
            n_freed = self._kv.n_released([victim.row for victim in victims])
            n_rows += victims[-1].kind.n_rows
        if n_new <= plan.free + n_freed and n_rows >= req.kind.n_rows:
            for victim in victims:
                plan.drop(victim, self._kv)

    def _n_new_blocks(self, req: Request, cached: Sequence[int], revived: Collection[int]) -> int:
        """The free blocks that admitting the request takes, if it begins with these cached blocks.

        A cached block that no request holds counts as free unless an earlier admission of this plan takes it
        (`revived`).
        """
        n_idle = self._kv.n_idle([block for block in cached if block not in revived])
        return self._blocks_to_reserve(req) - len(cached) + n_idle

    def _blocks_to_reserve(self, req: Request) -> int:
        """The blocks that a request gets when it is admitted."""
        if self._on_demand:
            return blocks_at_first(req, self._kv.block_size)
        return slots_to_reserve(req, self._kv.block_size) // self._kv.block_size

    def _n_tokens(self, req: Request, n_computed: int, n_to_compute: int, room: int) -> int:
        """The number of a prompt's tokens that run in this iteration, after those computed before."""
        if not self._chunked:
            return n_to_compute if n_to_compute <= room else 0
        border = next_border(req, n_computed, self._kv)
        if border is not None:
            n_to_compute = min(n_to_compute, border - n_computed)
        return max(0, min(n_to_compute, room))


def _by_phase(admitted: Iterable[Request], ahead: Collection[Request]) -> tuple[list[Request], list[Request]]:
    """The requests that are ready, split into decodes and prompts."""
    decodes: list[Request] = []
    prompts: list[Request] = []
    for req in admitted:
        if req.state is not _RUNNING or req in ahead:
            # Request.in_initiation, inlined for speed.
            is_prompt = req.state is not _INCREMENT and req.n_in_flight == req.n_partial
            (prompts if is_prompt else decodes).append(req)
    return decodes, prompts
