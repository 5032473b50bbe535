"""Prompts before decodes, as vLLM scheduled them before it had chunked prefill.

Papers: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP
2023); Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024),
which calls it prefill-prioritizing (Algorithm 2) and shows that it stalls decodes.
"""

from collections.abc import Collection, Iterable
from itertools import islice

from orca_jax.config import ServingConfig
from orca_jax.request.request import Request
from orca_jax.scheduling.cache_kinds import blocks_at_first
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.policy import Choice
from orca_jax.scheduling.request_pool import split
from orca_jax.scheduling.serving_policy import ServingPolicy


class PrefillFirst(ServingPolicy):
    """An iteration has prompts only, as long as one fits, and otherwise decodes only.

    Use it with `chunked_prefill=False`, so that prompts are computed whole. One in a hundred blocks stays
    free for requests that grow. Cached blocks count as if they were new.
    """

    def __init__(self, config: ServingConfig, kv: KVManager, *, n_workers: int) -> None:
        super().__init__(config, kv, n_workers=n_workers)
        self._kv = kv
        self._places = config.max_batch_size
        self._reserve = -(-kv.n_blocks // 100)

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request], alone: Request | None = None
    ) -> Choice:
        if alone is not None:
            return super().choose(pool, n_rsrv, ahead, alone)
        admitted, waiting = split(pool)
        prompts = [req for req in admitted if req.in_initiation]
        n_free = self._kv.n_free_blocks - (self._reserve if admitted else 0)
        for req in islice(waiting, max(0, self._places - len(admitted))):
            n_free -= blocks_at_first(req, self._kv.block_size)
            if n_free < 0 and (admitted or prompts):
                break
            prompts.append(req)
        if prompts:
            choice = super().choose(prompts, n_rsrv, ahead)
            if choice.rows:
                return choice
        return super().choose([req for req in admitted if not req.in_initiation], n_rsrv, ahead)
