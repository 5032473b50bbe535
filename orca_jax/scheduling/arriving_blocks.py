"""Arriving blocks: a waiting request's prompt, fetched from the server that computed it.

Blocks arrive in places of the host tier and are found there by their hash, so that all further copies are
those of the host tier. A transport writes them on threads of its own. Whatever goes wrong, the request finds
nothing and computes its prompt.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.request.request import Request, RequestState
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_lookup import (
    begins_with_a_known_token,
    cached_blocks,
    hash_prompt,
    host_blocks,
    most_blocks,
)


class Transport(Protocol):
    """Fetches blocks from other servers."""

    def fetch(
        self,
        params: KVTransferParams,
        digest: bytes,
        first: int,
        into: Sequence[Sequence[memoryview]],
        done: Callable[[bool], object],
        seconds: float,
    ) -> None:
        """Write a lease's blocks, from block `first` on, into these parts, and end the lease.

        Calls `done`, on any thread and within about `seconds`, once nothing writes to the parts any more;
        True if all are written. Never waits and never raises.
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


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks on their way; `generation` is the host tier's at the start."""

    request: Request
    hashes: Sequence[bytes]
    places: Sequence[int]
    generation: int
    ends: float


class ArrivingBlocks:
    """Fetches prompts for requests with `do_remote_prefill`, each within `seconds`.

    At most half of the host tier is for blocks that arrive or wait for their request's admission. `ask` and
    what a transport calls are for any thread, all else for the scheduler's. `wake` is called when blocks have
    arrived. `n_asked` counts requests, `n_failed` those that fetched nothing, and `n_blocks` blocks.
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
    ) -> None:
        assert kv.host is not None
        self._kv, self._host, self._facts = kv, kv.host, facts
        self._places, self._transport = places, transport
        self.seconds, self._clock = seconds, clock
        self.wake: Callable[[], object] = lambda: None
        self.n_asked = self.n_failed = self.n_blocks = 0
        self.stopped = False
        self._asked: deque[_Asked] = deque()
        self._waiting: set[Request] = set()  # of `_asked`
        self._fetches: dict[Request, _Fetch] = {}
        self._landed: dict[Request, int] = {}  # blocks that wait for their request's admission
        self._done: deque[tuple[_Fetch, bool]] = deque()

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
        params = req.kv_transfer
        if params is None or self.stopped or req.most_output < 2 or not begins_with_a_known_token(req):
            return None
        found = self._facts.first_token(params, req.prompt_ids, self._kv.owner_of(req.cache_salt))
        return None if found in req.end_token_ids else found

    def step(self) -> None:
        """Let blocks that have arrived be found, and start fetching others. Before each choice of rows."""
        while self._done:
            self._finish(*self._done.popleft())
        if self._landed:
            for req in [req for req in self._landed if not _waits(req)]:
                del self._landed[req]
        while self._asked and self._start(self._asked[0]):
            self._waiting.discard(self._asked.popleft().request)

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
        first = n_cached + host_blocks(req, n_cached, kv)
        most = max(1, host.n // 2)
        n = min(n_leased, most_blocks(req, kv)) - first
        costs = host.costs
        if n <= 0 or (costs is not None and not costs.pays(n * costs.peer, first, n)):
            self.n_asked += 1  # all are here, or quicker to compute: only end the lease
            self._transport.fetch(params, digest, 0, [], lambda _: None, ends - now)
            return True
        n = min(n, most)
        n_held = sum(len(fetch.places) for fetch in self._fetches.values()) + sum(self._landed.values())
        if n_held and n_held + n > most:
            return False
        places = self._take_places(n)
        if len(places) < n:
            return False
        self.n_asked += 1
        fetch = _Fetch(req, hashes[first : first + n], places, host.generation, ends)
        self._fetches[req] = fetch
        into = [self._places.views(place) for place in places]
        self._transport.fetch(params, digest, first, into, partial(self._ended, fetch), ends - now)
        return True

    def _take_places(self, n: int) -> list[int]:
        """`n` places of the host tier, or none."""
        places: list[int] = []
        n_done = self._places.n_done
        while len(places) < n:
            place = self._host.take_place(n_done)
            if place is None:
                for taken in places:
                    self._host.give_back(taken)
                return []
            places.append(place)
        return places

    def _ended(self, fetch: _Fetch, ok: bool) -> None:
        self._done.append((fetch, ok))
        self.wake()

    def _finish(self, fetch: _Fetch, ok: bool) -> None:
        del self._fetches[fetch.request]
        ok = ok and not self.stopped and fetch.generation == self._host.generation
        for block_hash, place in zip(fetch.hashes, fetch.places, strict=True):
            if ok and block_hash not in self._host:
                self._host.insert(block_hash, place)
            else:
                self._host.give_back(place)
        if not ok:
            self.n_failed += 1
            return
        self.n_blocks += len(fetch.places)
        if fetch.places and _waits(fetch.request):
            self._landed[fetch.request] = len(fetch.places)

    def _fail(self) -> None:
        self.n_asked += 1
        self.n_failed += 1


def _waits(req: Request) -> bool:
    """Whether a request waits for its first admission."""
    return req.row < 0 and not req.n_iterations and req.state is not RequestState.FINISHED
