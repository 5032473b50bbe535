"""A policy under watch: every choice is checked before it is issued, so that a wrong policy is named at once.

A user's policy (`package.file:Class`) is always watched in a simulation. On a real engine it is not: what is
wrong there shows as a failed assertion later, or as a request that never ends.
"""

import math
from collections.abc import Collection, Iterable, Sequence

from orca_jax.errors import BadPolicy
from orca_jax.request.request import Request, RequestState
from orca_jax.scheduling.cache_kinds import blocks_at_first, slots_to_reserve
from orca_jax.scheduling.policy import Choice
from orca_jax.scheduling.prefix_lookup import cached_blocks, host_blocks
from orca_jax.scheduling.scheduler import Scheduler

PATIENCE = 10_000  # turns
_MOST_NAMED = 5  # requests that a message names


def watch(scheduler: Scheduler, patience: int = PATIENCE) -> None:
    """Check each choice of the scheduler's policy from now on, if it is a user's.

    A request that waits for more than `patience` turns while a later one runs counts as starved.
    """
    if scheduler.config.scheduling.policy not in ("default", "orca"):
        scheduler.policy = CheckedPolicy(scheduler, patience)


class CheckedPolicy:
    """The scheduler's policy, whose choices raise BadPolicy if they break an invariant.

    A turn is a call of `choose`; the first is 1.
    """

    def __init__(self, scheduler: Scheduler, patience: int) -> None:
        self.turn = 0
        self._policy = scheduler.policy
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._patience = patience
        self._next_scan = patience
        self._most_computed: dict[Request, int] = {}
        self._last_new = 0  # the turn that last computed a token for the first time
        self._newest = -1  # the latest arrival that ran since the last scan
        self._since: dict[Request, tuple[int, int]] = {}  # iterations of a request, and the turn of the last

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        self.turn += 1
        n_held = self._kv.n_blocks - self._kv.n_free_blocks
        if n_rsrv != n_held * self._kv.block_size:
            self._refuse(
                f"n_rsrv is {n_rsrv}, but requests hold {n_held} blocks of {self._kv.block_size} slots; the "
                "last choice that admitted, grew or preempted a request returned a wrong n_rsrv"
            )
        choice = self._policy.choose(pool, n_rsrv, ahead, alone)
        self._check_preempted(choice)
        self._check_rows(choice, ahead)
        self._check_room(choice)
        self._check_progress(choice, pool)
        return choice

    def _refuse(self, why: str) -> None:
        raise BadPolicy(self.turn, why)

    def _check_preempted(self, choice: Choice) -> None:
        for req in choice.preempted:
            if req.row < 0 or req.n_in_flight:
                state = "is in flight" if req.n_in_flight else "is not admitted"
                self._refuse(
                    f"request {req.request_id} is preempted and {state}; preempt admitted ones at rest"
                )

    def _check_rows(self, choice: Choice, ahead: Collection[Request]) -> None:
        config = self._scheduler.config
        seen = set[Request]()
        n_places = n_tokens = 0
        for req, n in choice.rows:
            name = f"request {req.request_id}"
            if req in seen:
                self._refuse(f"{name} has two rows; give it one")
            seen.add(req)
            if req in choice.preempted:
                self._refuse(f"{name} is preempted and has a row; choose one of the two")
            if req.state is RequestState.FINISHED:
                self._refuse(f"{name} has ended; choose among the requests of the pool")
            if req.state is RequestState.RUNNING and req not in ahead:
                self._refuse(f"{name} is in flight; such a request may be chosen only if it is in `ahead`")
            most = req.n_to_compute if req.in_initiation else req.kind.most_tokens([req])[0]
            if not 1 <= n <= max(1, most):
                self._refuse(f"{name} has a row of {n} tokens; it can have 1 to {max(1, most)}")
            n_places += req.kind.n_rows
            n_tokens += n + req.n_to_encode
        if n_places > config.max_batch_size:
            self._refuse(f"the batch has {n_places} places; max_batch_size is {config.max_batch_size}")
        if n_tokens > config.max_batch_tokens:
            self._refuse(f"the batch has {n_tokens} tokens; max_batch_tokens is {config.max_batch_tokens}")

    def _check_room(self, choice: Choice) -> None:
        """Rows and blocks for all requests of the batch, and cached blocks that are really theirs."""
        kv = self._kv
        new = [req for req, _ in choice.rows if req.row < 0]
        n_rows = sum(req.kind.n_rows for req in new)
        n_free_rows = kv.n_free_rows + sum(req.kind.n_rows for req in choice.preempted)
        if n_rows > n_free_rows:
            self._refuse(f"{len(new)} requests are admitted, and {n_free_rows} rows are free")
        for req, blocks in choice.cached.items():
            known = cached_blocks(req, kv)
            if blocks != known[: len(blocks)]:
                self._refuse(f"request {req.request_id} begins with blocks {blocks}; it may share {known}")
        for req, n in choice.read_in.items():
            n_found = host_blocks(req, len(choice.cached.get(req, ())), kv)
            if n > n_found:
                self._refuse(f"request {req.request_id} reads in {n} blocks; the host tier has {n_found}")
        if any(req.kind.forks for req, _ in choice.rows):  # beams share blocks in ways that only they know
            return
        revived = {block for req in new for block in choice.cached.get(req, ())}
        n_wanted = sum(self._n_blocks(req, n, choice) for req, n in choice.rows) + kv.n_idle([*revived])
        n_free = kv.n_free_blocks + kv.n_released([req.row for req in choice.preempted])
        if n_wanted > n_free:
            self._refuse(
                f"the rows need {n_wanted} more blocks, and {n_free} are free; preempt, or choose fewer"
            )

    def _n_blocks(self, req: Request, n_tokens: int, choice: Choice) -> int:
        """The blocks that a row adds to its request's, without cached ones."""
        kv = self._kv
        if req.row >= 0:
            n_held = kv.slots_of[req.row] // kv.block_size
            return max(0, kv.n_blocks_for(req.n_computed + n_tokens) - n_held)
        if self._scheduler.config.scheduling.on_demand:
            n = blocks_at_first(req, kv.block_size)
        else:
            n = slots_to_reserve(req, kv.block_size) // kv.block_size
        return n - len(choice.cached.get(req, ()))

    def _check_progress(self, choice: Choice, pool: Iterable[Request]) -> None:
        for req, n in choice.rows:
            end = req.n_computed + n
            if end > self._most_computed.get(req, 0):
                self._most_computed[req] = end
                self._last_new = self.turn
            self._newest = max(self._newest, req.arrival)
        if not choice.rows and not choice.preempted and not self._scheduler.n_scheduled:
            live = [*pool]
            if live:
                self._refuse(
                    f"the batch is empty, nothing is in flight, and {_named(live)} could run: nothing will "
                    "ever run again; give one of them a row"
                )
        if self.turn - self._last_new > self._patience:
            self._refuse(
                f"no token was computed for the first time in {self._patience} turns, while "
                f"{_named([*pool])} wait; requests preempt one another without end"
            )
        if self.turn >= self._next_scan:
            self._find_starved([*pool])

    def _find_starved(self, live: Sequence[Request]) -> None:
        since = dict[Request, tuple[int, int]]()
        for req in live:
            n, turn = self._since.get(req, (-1, self.turn))
            since[req] = (n, turn) if req.n_iterations == n else (req.n_iterations, self.turn)
            waited = self.turn - since[req][1]
            if waited > self._patience and req.arrival < self._newest:
                self._refuse(
                    f"request {req.request_id} starves: it has had no row for {waited} turns, while requests "
                    "that arrived later ran"
                )
        self._since = since
        self._most_computed = {req: n for req, n in self._most_computed.items() if req in since}
        self._next_scan = self.turn + math.ceil(self._patience / 4)
        self._newest = -1


def _named(requests: Sequence[Request]) -> str:
    names = ", ".join(req.request_id for req in requests[:_MOST_NAMED])
    more = ", ..." if len(requests) > _MOST_NAMED else ""
    return f"{len(requests)} requests ({names}{more})"
