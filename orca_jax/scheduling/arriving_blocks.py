"""Arriving blocks: a waiting request's prompt, fetched from the server that computed it.

Blocks arrive in places of the host tier and are found there by their hash, so that all further copies are
those of the host tier. A transport writes them on threads of its own, often while the other server computes
later blocks. Whatever goes wrong, the request finds the blocks that came before, and computes the others.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.request.request import Request, RequestState
from orca_jax.scheduling.host_tier import HostTier
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_lookup import (
    begins_with_a_known_token,
    blocks_in_tiers,
    cached_blocks,
    hash_prompt,
    host_blocks,
    most_blocks,
)


class Receiver(Protocol):
    """Follows a fetch. A transport calls it on any thread, and nothing after `done`."""

    def said(self, token_id: int, proof: str) -> None:
        """The other server has sampled the first token of the output."""
        ...

    def arrived(self, n: int) -> None:
        """The first `n` blocks are written."""
        ...

    def done(self, ok: bool) -> None:
        """Nothing writes to the parts any more; `ok` if all are written."""
        ...


class Transport(Protocol):
    """Fetches blocks from other servers."""

    def fetch(
        self,
        params: KVTransferParams,
        digest: bytes,
        first: int,
        into: Sequence[Sequence[memoryview]],
        receiver: Receiver,
        seconds: float,
        seconds_each: float,
    ) -> None:
        """Write a lease's blocks, from block `first` on, into these parts, and end the lease.

        After its blocks a lease may have a state of recurrent layers, which counts as one more. A lease may
        still grow: its blocks come as they are computed. The fetch fails if the first do not come within
        about `seconds`, or others within `seconds_each` of those before them. With no parts it only ends the
        lease. Never waits and never raises.
        """
        ...

    def close(self) -> None:
        """End all fetches and threads."""
        ...


class Places(Protocol):
    """The host tier's memory."""

    @property
    def n_done(self) -> int:
        """Iterations, in the order of issue, whose copies are all made."""
        ...

    def views(self, place: int) -> Sequence[memoryview]:
        """The parts of a block's memory, for others to write to."""
        ...


class _Asked(NamedTuple):
    request: Request
    params: KVTransferParams
    ends: float


class _Target(NamedTuple):
    """The place of a tier to which what has this hash comes."""

    tier: HostTier
    block_hash: bytes
    place: int


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks on their way, a Receiver; `generation` is the host tier's at the start.

    With recurrent layers the last target is the place of the state after the blocks. The first `n_arrived`
    targets are written. Its request waits until `ends`.
    """

    owner: "ArrivingBlocks"
    request: Request
    params: KVTransferParams
    targets: Sequence[_Target]
    n_blocks: int
    generation: int
    ends: float
    n_arrived: int = 0

    def said(self, token_id: int, proof: str) -> None:
        self.owner.note(partial(self.owner.hear, self, token_id, proof))

    def arrived(self, n: int) -> None:
        self.n_arrived = n
        self.ends = self.owner.time_from_now()

    def done(self, ok: bool) -> None:
        self.owner.note(partial(self.owner.finish, self, ok))


class _Nobody:
    """The Receiver of a fetch that only ends a lease."""

    def said(self, token_id: int, proof: str) -> None:
        pass

    def arrived(self, n: int) -> None:
        pass

    def done(self, ok: bool) -> None:
        pass


class ArrivingBlocks:
    """Fetches prompts for requests with `do_remote_prefill`, each piece within `seconds`.

    At most half of the host tier is for blocks that arrive or wait for their request's admission, and of its
    states, whose memory is `state_places`. `ask` and what a transport calls are for any thread, all else for
    the scheduler's. `wake` is called when blocks have arrived. `n_asked` counts requests, `n_failed` those
    whose blocks did not all come, and `n_blocks` blocks.
    """

    def __init__(
        self,
        kv: KVManager,
        facts: TransferFacts,
        places: Places,
        transport: Transport,
        *,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        state_places: Places | None = None,
    ) -> None:
        assert kv.host is not None
        self._kv, self._host, self._facts = kv, kv.host, facts
        self._places, self._state_places, self._transport = places, state_places, transport
        self.seconds, self._clock = seconds, clock
        self.wake: Callable[[], object] = lambda: None
        self.n_asked = self.n_failed = self.n_blocks = 0
        self.stopped = False
        self._asked: deque[_Asked] = deque()
        self._waiting: set[Request] = set()  # of `_asked`
        self._fetches: dict[Request, _Fetch] = {}
        self._landed: dict[Request, int] = {}  # blocks that wait for their request's admission
        self._news: deque[Callable[[], object]] = deque()
        self._begun: dict[Request, int] = {}  # first tokens that have come

    @property
    def n_under_way(self) -> int:
        """Requests whose blocks are asked for or on their way."""
        return len(self._waiting) + len(self._fetches)

    def ask(self, req: Request) -> None:
        """Let the blocks of a request that arrives be fetched. Under the pool's lock, on any thread."""
        params = req.kv_transfer
        if params is None or self.stopped or not self._facts.trusts(params):
            return
        self._waiting.add(req)
        self._asked.append(_Asked(req, params, self._clock() + self.seconds))

    def first_token(self, req: Request) -> int | None:
        """The first token of the output, if the other server has sampled it. Any thread."""
        return None if req.kv_transfer is None else self._said(req, req.kv_transfer)

    def step(self) -> list[tuple[Request, int]]:
        """Let blocks that have arrived be found, and start fetching others. Before each choice of rows.

        Returns requests that begin with these tokens, which other servers have sampled.
        """
        while self._news:
            self._news.popleft()()
        if self._landed:
            for req in [req for req in self._landed if not _waits(req)]:
                del self._landed[req]
        while self._asked and self._start(self._asked[0]):
            self._waiting.discard(self._asked.popleft().request)
        begun = [*self._begun.items()]
        self._begun.clear()
        return begun

    def awaits(self, req: Request) -> bool:
        """Whether a waiting request's blocks are on their way."""
        if req in self._waiting:
            return True
        fetch = self._fetches.get(req)
        return fetch is not None and self._clock() < fetch.ends

    def stop(self) -> None:
        """Fetch nothing from now on: the engine has other weights."""
        self.stopped = True

    def close(self) -> None:
        """End all fetches."""
        self.stop()
        self._transport.close()

    def note(self, news: Callable[[], object]) -> None:
        """Let the next step do this. Any thread."""
        self._news.append(news)
        self.wake()

    def time_from_now(self) -> float:
        """When a request has waited long enough for its next blocks. Any thread."""
        return self._clock() + self.seconds

    def hear(self, fetch: _Fetch, token_id: int, proof: str) -> None:
        """Begin an output with a token that is proved for its whole prompt, if its request still waits."""
        req = fetch.request
        if req.ending is not None or req.output_ids or not _waits(req):
            return
        said = replace(fetch.params, first_token_id=token_id, first_token_proof=proof)
        if self._said(req, said) is not None:
            self._begun[req] = token_id

    def _said(self, req: Request, params: KVTransferParams) -> int | None:
        """The first token of the output that these params say, unless it would end the output."""
        if self.stopped or not _may_begin(req):
            return None
        found = self._facts.first_token(params, req.prompt_ids, self._kv.owner_of(req.cache_salt))
        return None if found in req.end_token_ids else found

    def _start(self, asked: _Asked) -> bool:
        """Start a fetch, or find that there is nothing to fetch; False if it has to wait for room."""
        req, params, ends = asked
        kv, host, now = self._kv, self._host, self._clock()
        if self.stopped or not _waits(req) or now >= ends:
            self._fail()
            return True
        hashes = hash_prompt(req, kv)
        n_leased = len(params.remote_block_ids)
        tokens = req.prompt_ids[: n_leased * kv.block_size]
        if n_leased > len(hashes) or not n_leased:
            self._fail()
            return True
        digest = self._facts.digest(tokens, kv.owner_of(req.cache_salt))
        n_cached = len(cached_blocks(req, kv))
        n_useful = first = n_cached + host_blocks(req, n_cached, kv)
        # The first token may come with the blocks, and then the last one may be of use.
        n_wanted = min(n_leased, len(hashes) if _may_begin(req) else most_blocks(req, kv))
        most = max(1, host.n // 2)
        states = kv.host_states
        if states is not None:  # of use only with all blocks before it
            first = max(first, min(n_leased, blocks_in_tiers(req, kv)))
            n_wanted = n_leased if n_leased <= most_blocks(req, kv) and n_leased - first <= most else 0
        n = n_wanted - first
        if n_wanted <= n_useful or not self._pays(n, n_wanted, n_useful):
            self.n_asked += 1  # all are here, or quicker to compute: only end the lease
            self._transport.fetch(params, digest, 0, [], _Nobody(), ends - now, self.seconds)
            return True
        n = min(n, most)
        n_held = sum(fetch.n_blocks for fetch in self._fetches.values()) + sum(self._landed.values())
        if n_held and n_held + n > most:
            return False
        n_fetched = len(self._fetches) + len(self._landed)
        if states is not None and n_fetched and n_fetched + 1 > states.n // 2:
            return False
        places = _take_places(self._host, self._places, n)
        if len(places) < n:
            return False
        into = [self._places.views(place) for place in places]
        targets = [_Target(host, hashes[first + i], place) for i, place in enumerate(places)]
        if states is not None:
            assert self._state_places is not None
            of_state = _take_places(states, self._state_places, 1)
            if not of_state:
                for place in places:
                    self._host.give_back(place)
                return False
            targets.append(_Target(states, hashes[n_leased - 1], of_state[0]))
            into.append(self._state_places.views(of_state[0]))
        self.n_asked += 1
        fetch = _Fetch(self, req, params, targets, n, host.generation, ends)
        self._fetches[req] = fetch
        self._transport.fetch(params, digest, first, into, fetch, ends - now, self.seconds)
        return True

    def _pays(self, n: int, end: int, first: int) -> bool:
        """Whether fetching `n` blocks is quicker than computing those after the `first` and before `end`."""
        costs = self._host.costs
        if costs is None:
            return True
        n_states = 0.0 if self._kv.host_states is None else costs.state
        return costs.pays((n + n_states) * costs.peer, first, end - first)

    def finish(self, fetch: _Fetch, ok: bool) -> None:
        """Let what has come be found, and give back the other places."""
        del self._fetches[fetch.request]
        if self.stopped or fetch.generation != self._host.generation:
            fetch.n_arrived, ok = 0, False
        for i, (tier, block_hash, place) in enumerate(fetch.targets):
            _arrive(tier, block_hash, place, ok=i < fetch.n_arrived)
        self.n_failed += not ok
        n_blocks = min(fetch.n_arrived, fetch.n_blocks)
        self.n_blocks += n_blocks
        if fetch.n_arrived and _waits(fetch.request):
            self._landed[fetch.request] = n_blocks

    def _fail(self) -> None:
        self.n_asked += 1
        self.n_failed += 1


def _take_places(tier: HostTier, memory: Places, n: int) -> list[int]:
    """`n` places of a tier, or none."""
    places: list[int] = []
    n_done = memory.n_done
    while len(places) < n:
        place = tier.take_place(n_done)
        if place is None:
            for taken in places:
                tier.give_back(taken)
            return []
        places.append(place)
    return places


def _arrive(tier: HostTier, block_hash: bytes, place: int, *, ok: bool) -> None:
    """Let what has come to a place be found, or give the place back."""
    if ok and block_hash not in tier:
        tier.insert(block_hash, place)
    else:
        tier.give_back(place)


def _may_begin(req: Request) -> bool:
    """Whether an output may begin with a token that another server samples."""
    params = req.kv_transfer
    own = params is None or params.samples_first or req.most_output < 2
    return not own and begins_with_a_known_token(req)


def _waits(req: Request) -> bool:
    """Whether a request waits for its first admission."""
    return req.row < 0 and not req.n_iterations and req.state is not RequestState.FINISHED
