"""The engine of a draft model: a smaller model drafts for all requests of a batch in its own iterations.

It has its own weights, K/V cache and K/V manager, and runs on the scheduler's thread, between two iterations
of the model that is served. Each drafted request has a copy here, which follows the request's output: a round
computes the tokens accepted since the last round, as a prompt's tokens are computed, and then decodes. A copy
samples as its request does, with the same parameters, seed and token indices, so sampled drafts are right
wherever both models would draw the same token with the same random number.

Right drafts stay in the K/V cache; after wrong ones the accepted tokens take their slots. A copy ends when
its request holds no row any more: it has ended, was preempted, or was lost with a worker.

A head reads the served model's hidden states (`ServedCache`). It computes a token from the state of the token
before it, so its copies begin with the request's second token, and its first drafts follow its own outputs.
These are computed again from the served model's states once their tokens are accepted.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from orca_jax.config import ServingConfig
from orca_jax.engine_memory import EngineMemory
from orca_jax.families.model_config import ModelConfig
from orca_jax.iteration.shape import bucket_for, serving_buckets
from orca_jax.request.request import Request, RequestState, Row, begin_iteration
from orca_jax.scheduling.engine_protocol import Engine, Iteration, never
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_lookup import cached_blocks, publish_full_blocks, reserve_sharing

_log = logging.getLogger(__name__)

# Tokens that a copy in use may be behind. More are those of a prompt, or of a pause: they are computed once
# for all drafts to come, so that a round bears only its part of their time.
_USUALLY_BEHIND = 8
# The part of an output's greatest length that it is expected to have.
_EXPECTED_LENGTH = 0.5


@dataclass(slots=True, eq=False)
class _Copy:
    """A request as the draft model computes it; `output_ids` is the list of the request itself.

    `drafts` are the newest ones, which follow the first `n_output` output tokens. Keys and values of
    `own.n_computed` tokens hold as long as the output has `n_compared` tokens.
    """

    own: Request
    drafts: list[int] = field(default_factory=list[int])
    n_output: int = 0
    n_compared: int = -1


@dataclass(frozen=True, slots=True)
class ServedCache:
    """The served model's cache, in which a head reads hidden states.

    `of_block` has for each block of the head's cache the block in `kv` whose states come before the same
    tokens; it is written before an iteration of these tokens.
    """

    kv: KVManager
    of_block: npt.NDArray[np.int32]

    def follow(self, req: Request, own_row: int, kv: KVManager) -> None:
        """Note the blocks of a request whose copy has this row of the head's cache."""
        served = self.kv.block_table[req.row]
        n_blocks = min(self.kv.n_blocks_for(req.n_computed), kv.slots_of[own_row] // kv.block_size)
        self.of_block[kv.block_table[own_row, :n_blocks]] = served[:n_blocks]


class DraftEngine:
    """Drafts for many requests at once (request.SharedDrafter).

    `costs` are the times of an iteration of each bucket of `config`, in the unit of the served model's
    (ServingConfig.iteration_costs). `memory` is the engine's weights and caches. After an error of the engine
    `failed` is True, and there are no more drafts. A head has the `served` cache before its first request.
    """

    def __init__(
        self,
        engine: Engine,
        kv: KVManager,
        *,
        model: ModelConfig,
        config: ServingConfig,
        costs: Sequence[float],
        memory: EngineMemory | None = None,
    ) -> None:
        assert engine.keeps_tokens, "several tokens are drafted before the host has the first"
        self.failed = False
        self.config = config
        self.model = model
        self.memory = memory
        self.kv = kv
        self.served: ServedCache | None = None
        self._engine = engine
        self._cost_of = dict(zip(serving_buckets(config), costs, strict=True))
        self._buckets = serving_buckets(config)
        self._copies: dict[Request, _Copy] = {}

    @property
    def n_followed(self) -> int:
        """The requests that have a copy."""
        return len(self._copies)

    def cost(self, wanted: Sequence[tuple[Request, int]]) -> float:
        n_first, later = 0, 0.0
        per_token = self._cost_of[self._buckets[-1]] / self._buckets[-1]
        for req, n in wanted:
            copy = self._copy(req)
            n_behind = 0 if copy is None else copy.own.n_to_compute
            usual = min(n_behind, _USUALLY_BEHIND)
            n_first += usual
            expected = _EXPECTED_LENGTH * (req.most_output - len(req.output_ids))
            later += per_token * (n_behind - usual) * min(1.0, (n + 1) / max(1.0, expected))
        n_rows = [sum(n > depth for _, n in wanted) for depth in range(1, max(n for _, n in wanted))]
        return later + sum(map(self._cost, (n_first, *n_rows)))

    def draft(self, wanted: Sequence[tuple[Request, int]]) -> list[Sequence[int] | None]:
        try:
            return self._draft(wanted)
        except Exception:
            self.failed = True
            _log.exception("the draft model failed; all requests go on without drafts")
            return [None] * len(wanted)

    def forget(self) -> None:
        """Drop all keys and values: they are lost, or of other weights. No round is under way."""
        self._drop(list(self._copies))
        self.kv.forget()

    def _cost(self, n_tokens: int) -> float:
        return self._cost_of[bucket_for(min(n_tokens, self._buckets[-1]), self._buckets)] if n_tokens else 0.0

    def _draft(self, wanted: Sequence[tuple[Request, int]]) -> list[Sequence[int] | None]:
        self._drop([req for req in self._copies if req.row < 0])
        copies = [self._copy(req) for req, _ in wanted]
        following = [
            (req, copy, n) for copy, (req, n) in zip(copies, wanted, strict=True) if copy is not None
        ]
        following.sort(key=lambda each: each[1].own.n_to_compute)
        n_left, rows, ready = self.config.max_batch_tokens, list[Row](), list[tuple[Request, int]]()
        for req, copy, n in following:
            own = copy.own
            copy.drafts, copy.n_output, copy.n_compared = [], len(own.output_ids), -1
            cached = cached_blocks(own, self.kv) if own.row < 0 else []
            if own.row < 0:
                own.n_computed = len(cached) * self.kv.block_size
            n_behind = own.n_to_compute
            n_tokens = min(n_behind, n_left)
            # The first draft follows the last known token. The last draft is not computed.
            n_more = min(n - 1, self.model.n_positions - own.n_tokens) if n_tokens == n_behind else 0
            if not n_tokens or not self._take_slots(own, own.n_computed + n_tokens + n_more, cached):
                continue
            if self.served is not None:
                self.served.follow(req, own.row, self.kv)
            rows.append((own, n_tokens))
            n_left -= n_tokens
            if n_tokens == n_behind:
                ready.append((own, 1 + n_more))
        if rows:
            self._run(rows, ready)
        return [None if copy is None else copy.drafts for copy in copies]

    def _run(self, rows: Sequence[Row], ready: Sequence[tuple[Request, int]]) -> None:
        """Run the first iteration, whose `rows` know their tokens, and then those of the `ready` copies."""
        # A row that has sampled would go on with its last token, which its request may not have accepted.
        self.kv.n_reserved[[own.row for own, _ in rows]] += 1
        copy_of = {copy.own: copy for copy in self._copies.values()}
        pending = deque([self._issue(rows)])
        for depth in range(1, max([n for _, n in ready], default=0)):
            pending.append(self._issue([(own, 1) for own, n in ready if n > depth]))
            self._take(pending.popleft(), copy_of)
        self._take(pending.popleft(), copy_of)
        for own, _ in rows:
            own.n_in_flight = own.n_partial = 0
            own.state = RequestState.INITIATION

    def _issue(self, rows: Sequence[Row]) -> Iteration:
        iteration = self._engine.issue(rows)
        partial, _ = begin_iteration(rows)
        iteration.partial = frozenset(partial)
        return iteration

    def _take(self, iteration: Iteration, copy_of: dict[Request, _Copy]) -> None:
        returned = self._engine.wait(iteration, never)
        assert returned is not None
        for i, ((own, _), token_id) in enumerate(zip(iteration.rows, returned.token_ids, strict=True)):
            if i not in iteration.partial:
                copy_of[own].drafts.append(token_id)

    def _copy(self, req: Request) -> _Copy | None:
        """The request's copy, with the number of its tokens whose keys and values hold.

        None if the model cannot compute the request: it is too long, or has tokens that the model has not.
        """
        copy, n_tokens, n_prompt = self._copies.get(req), req.n_tokens, len(req.prompt_ids)
        if n_tokens > self.model.n_positions or n_prompt <= self._n_left_out:
            return None
        if copy is None:
            if max(req.prompt_ids) >= self.model.vocab_size or not self._knows(req.output_ids):
                return None
            own = _plain(req, self.model.vocab_size, self._n_left_out)
            copy = self._copies[req] = _Copy(own)
            copy.own.n_computed = len(cached_blocks(copy.own, self.kv)) * self.kv.block_size
            return copy
        if copy.n_compared == len(req.output_ids):
            return copy
        accepted = req.output_ids[copy.n_output :]
        if not self._knows(accepted):
            return None
        own, copy.n_compared = copy.own, len(req.output_ids)
        pairs = zip(accepted, copy.drafts, strict=False)
        n_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self.model.reads is not None:
            n_right = 0  # drafts were computed without the served model's states
        n_known = len(own.prompt_ids) + copy.n_output + n_right
        own.n_computed = min(own.n_computed, n_known, own.n_tokens - 1)
        if own.n_computed >= own.full_at and own.row >= 0:
            publish_full_blocks((own,), self.kv)
        return copy

    @property
    def _n_left_out(self) -> int:
        """The request's first tokens that a copy leaves out: before the first one there is no state."""
        return 0 if self.model.reads is None else 1

    def _knows(self, token_ids: Iterable[int]) -> bool:
        return max(token_ids, default=0) < self.model.vocab_size

    def _take_slots(self, own: Request, n_tokens: int, cached: Sequence[int]) -> bool:
        """Let the copy have slots for `n_tokens` tokens, a new one from `cached` blocks on.

        False if too few are free.
        """
        kv = self.kv
        n_held = len(cached) - kv.n_idle(cached) if own.row < 0 else kv.slots_of[own.row] // kv.block_size
        if kv.n_blocks_for(n_tokens) - n_held > kv.n_free_blocks or (own.row < 0 and not kv.n_free_rows):
            return False
        if own.row >= 0:
            kv.grow(own.row, n_tokens)
        elif kv.prefixes is None:
            own.row = kv.reserve(n_tokens)
        else:
            reserve_sharing([own], [n_tokens], {own: list(cached)}, kv)
        return True

    def _drop(self, requests: Iterable[Request]) -> None:
        for req in requests:
            own = self._copies.pop(req).own
            if own.row >= 0:
                self.kv.release(own.row)


def _plain(req: Request, vocab_size: int, n_left_out: int) -> Request:
    """A plain request for the same tokens but the first `n_left_out`, without anything else to return.

    Where tokens are left out, their states count: blocks are shared only after the same tokens.
    """
    sampling = req.sampling
    bias = {token_id: value for token_id, value in sampling.logit_bias.items() if token_id < vocab_size}
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None or bias != sampling.logit_bias:
        sampling = replace(sampling, logprobs=None, prompt_logprobs=None, logit_bias=bias)
    own = Request(
        req.request_id,
        req.prompt_ids[n_left_out:],
        req.max_tokens,
        sampling,
        req.seed,
        cache_salt=(*req.cache_salt, *(f"after {token_id}" for token_id in req.prompt_ids[:n_left_out])),
        block_hashes=None if req.block_hashes is None or n_left_out else list(req.block_hashes),
    )
    own.output_ids = req.output_ids
    return own
