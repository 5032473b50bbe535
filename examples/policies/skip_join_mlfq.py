"""The skip-join multi-level feedback queue of FastServe.

Paper: Wu et al., "Fast Distributed Inference Serving for Large Language Models" (2023). Output lengths are
unknown, but the first iteration's time follows from the prompt. So a request skips the levels whose quantum
its prompt exceeds, instead of being demoted through them. It sinks one level whenever it has used a level's
quantum, and rises to the first one when it has waited too long.

FastServe swaps the keys and values of preempted requests to the host. Here they stay in the prefix cache
while there is room; what was evicted is computed again.
"""

from collections.abc import Collection, Iterable

from orca_jax.config import ServingConfig
from orca_jax.request.request import Request
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.policy import Choice
from orca_jax.scheduling.serving_policy import ServingPolicy


class SkipJoinMLFQ(ServingPolicy):
    """Lower levels go first, each first come, first served; a higher level gives way to a lower one.

    Service is counted in prompt tokens, and a decode as `decode_cost` of them, about what takes as long on
    the device. Level i has a quantum of `quantum * 2**i`. A request that waits for `patience` turns is
    promoted to level 0.
    """

    quantum = 512
    decode_cost = 32
    patience = 2000
    n_levels = 16

    def __init__(self, config: ServingConfig, kv: KVManager, *, n_workers: int) -> None:
        super().__init__(config, kv, n_workers=n_workers)
        self._turn = 0
        self._waits_since: dict[int, int] = {}  # by arrival: the first turn without a row
        self._promoted_at: dict[int, float] = {}  # by arrival: the service had before the promotion

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        self._turn += 1
        if self._turn % self.patience == 0:  # forget the requests that have ended
            live = {req.arrival for req in pool}
            self._waits_since = {i: turn for i, turn in self._waits_since.items() if i in live}
            self._promoted_at = {i: had for i, had in self._promoted_at.items() if i in live}
        choice = super().choose(pool, n_rsrv, ahead, alone)
        for req, _ in choice.rows:
            self._waits_since.pop(req.arrival, None)
        return choice

    def order(self, req: Request) -> tuple[float, ...]:
        since = self._waits_since.setdefault(req.arrival, self._turn)
        if self._turn - since > self.patience:
            self._promoted_at[req.arrival] = self._service(req)
            self._waits_since[req.arrival] = self._turn
        return self.level(req), req.arrival

    def gives_way(self, admitted: Request, waiting: Request) -> bool:
        return self.level(admitted) > self.level(waiting)

    def level(self, req: Request) -> int:
        """The level of a request: where it joined, and one more for each quantum that it has used up."""
        joins, used = 0, self._service(req)
        if req.arrival in self._promoted_at:
            used -= self._promoted_at[req.arrival]
        else:
            while self.quantum << joins < req.n_input and joins < self.n_levels:
                joins += 1
        level = joins
        while used > self.quantum << level and level < self.n_levels:
            used -= self.quantum << level
            level += 1
        return level

    def _service(self, req: Request) -> float:
        """The tokens that a request has had: its prompt, unless that is still to come, and its output."""
        begun = bool(req.output_ids) or req.n_computed > 0
        return begun * req.n_input + self.decode_cost * len(req.output_ids)
