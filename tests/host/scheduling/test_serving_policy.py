"""Invariants of every turn for every combination of options, over random traces on a checked engine.

The checked engine keeps a model of the cache: for each slot, the tokens that its key and value depend on. A
row may only read slots that hold exactly its own tokens, and only write to blocks that no other row holds.
With snapshots it keeps the same of each state of recurrent layers: a row goes on from exactly its own tokens.
With a host tier it copies what slots and states hold out and in, as the workers do; a disk tier has files of
the same, and prompts of other servers arrive there. Others take prompts from here while they are computed.
"""

import ast
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from orca_jax.config import SchedulingConfig, ServingConfig
from orca_jax.errors import EngineError
from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.request.request import FinishReason, Request, RequestState, Row
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling import serving_policy
from orca_jax.scheduling.arriving_blocks import ArrivingBlocks, Receiver
from orca_jax.scheduling.blocks import round_up
from orca_jax.scheduling.disk_tier import DiskTier
from orca_jax.scheduling.engine_protocol import Iteration, Returned
from orca_jax.scheduling.host_tier import HostTier
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.leases import Lease, Leases
from orca_jax.scheduling.restart import fail_all
from orca_jax.scheduling.tier_costs import TierCosts
from orca_jax.simulation.simulation import Shown, Simulation

ORDERS = ("fcfs", "priority", "fair", "longest-prefix")
SWITCHES = [
    (chunked, prefixes, reservation, order)
    for chunked, prefixes, reservation, order in itertools.product(
        (False, True), (False, True), ("full", "on-demand"), ORDERS
    )
    if prefixes or order != "longest-prefix"
]
WINDOW = 2  # of "longest-prefix" here, so that short traces have several
N_TRACES = 420  # for each of 28 combinations: over 10,000


@dataclass(frozen=True)
class Arrival:
    time: float
    prompt: tuple[int, ...]
    n_output: int
    salt: tuple[str, ...]
    owner: str
    priority: int


@dataclass(frozen=True)
class Trace:
    serving: ServingConfig
    n_workers: int
    arrivals: tuple[Arrival, ...]
    ends: tuple[tuple[int, int], ...]  # a moment, and a request's number
    faults: tuple[int, ...]  # moments
    has_disk: bool = False  # a disk tier, below the host tier
    has_peer: bool = False  # another server, which has computed some prompts
    has_taker: bool = False  # another server, which fetches some prompts


def random_trace(seed: int, switches: tuple[bool, bool, str, str]) -> Trace:
    rng = random.Random(seed)
    chunked, prefixes, reservation, order = switches
    block_size = rng.randint(1, 4)
    n_requests = rng.choice((1, 2, 4, 8, 16))
    stems = [tuple(rng.choices((7, 8), k=rng.randint(1, 14))) for _ in range(rng.choice((1, 2)))]
    arrivals: list[Arrival] = []
    time = 0.0
    for _ in range(n_requests):
        time += rng.choice((0.0, 0.0, 0.3, 1.0, 4.0))
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + tuple(rng.choices((7, 8), k=rng.choice((0, 0, 1, 5))))
        arrivals.append(
            Arrival(
                time,
                prompt,
                rng.randint(1, rng.choice((1, 4, 20))),
                rng.choice(((), (), ("a",))),
                rng.choice("AB"),
                rng.choice((0, 0, 1, -2)),
            )
        )
    largest = max(len(a.prompt) + a.n_output for a in arrivals)
    max_bs = rng.randint(1, 5)
    # In chunks a prompt, and after a preemption all tokens, may exceed an iteration.
    max_batch_tokens = max(max_bs, largest) + rng.choice((0, 5, 100))
    if chunked and rng.random() < 0.5:
        max_batch_tokens = max_bs + rng.choice((0, 1, 3))
    # Of a model with recurrent layers, or of one without.
    kept = random.Random(f"snapshots {seed}")
    n_snapshots, snapshot_blocks = kept.choice((0, 1, 2, 6)) if prefixes else 0, kept.choice((1, 2, 5))
    on_host = random.Random(f"host {seed}")
    n_host_blocks = on_host.choice((0, 4, 30, 30)) if prefixes else 0
    n_host_states = on_host.choice((1, 2, 20)) if n_snapshots and n_host_blocks else 0
    return Trace(
        ServingConfig(
            max_batch_size=max_bs,
            n_slots=round_up(largest, block_size) + rng.choice((0, 0, 1, largest, 3 * largest)),
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            overlap=rng.random() < 0.7,
            n_snapshots=n_snapshots,
            n_host_blocks=n_host_blocks,
            n_host_states=n_host_states,
            scheduling=SchedulingConfig(
                chunked_prefill=chunked,
                prefill_tokens=rng.choice((None, 1, 3, 8)),
                prefix_caching=prefixes,
                snapshot_blocks=snapshot_blocks,
                reservation=reservation,  # pyright: ignore[reportArgumentType]
                scheduling_policy=order,  # pyright: ignore[reportArgumentType]
                aging_seconds=rng.choice((0.5, 5.0)),
            ),
        ),
        n_workers=rng.choice((1, 1, 2, 3)),
        arrivals=tuple(arrivals),
        ends=tuple(
            (rng.randrange(12 * n_requests), rng.randrange(n_requests))
            for _ in range(rng.choice((0, 0, 2, 6)))
        ),
        faults=(rng.randrange(50),) if rng.random() < 0.1 else (),
        has_disk=random.Random(f"disk {seed}").random() < 0.5,
        has_peer=random.Random(f"peer {seed}").random() < 0.5,
        has_taker=random.Random(f"taker {seed}").random() < 0.5,
    )


def token_of(request: Request, index: int) -> int:
    return 7 + (request.seed + index) % 2  # as in the prompts, so that outputs and prompts meet


class Sink:
    def __init__(self, moment: Callable[[], None]) -> None:
        self.moment = moment

    def push(self, token_id: int) -> bool:
        self.moment()
        return False


class Memory:
    """The places of a tier in the memory of a checked engine, `first` and later ones there."""

    def __init__(self, player: "Player", tier: HostTier, first: int) -> None:
        self.player, self.tier, self.first = player, tier, first

    @property
    def n_done(self) -> int:
        # At rest the devices have made all copies.
        return self.tier.n_issued - self.player.disk.lag * bool(self.player.scheduler.in_flight)

    def get(self, place: int) -> list[bytes]:
        assert self.tier.last_use(place) < self.n_done
        return [repr(self.player.engine.host[self.first + place]).encode()]

    def put(self, place: int, data: bytes) -> None:
        assert self.tier.last_use(place) < self.n_done
        self.player.engine.host[self.first + place] = ast.literal_eval(data.decode())

    def views(self, place: int) -> list[memoryview]:
        assert self.tier.last_use(place) < self.n_done
        return [self.player.peer.view_of(self.first + place)]


class Disk:
    """Files of blocks that say what they hold, some damaged.

    As many of the newest iterations as `lag` still have copies to make.
    """

    def __init__(self, player: "Player", seed: int) -> None:
        self.player = player
        self.rng = random.Random(seed)
        self.lag = self.rng.choice((0, 0, 1, 2))
        self.share_damaged = 0.1
        self.files: dict[bytes, bytes] = {}
        self.loaded: list[tuple[bytes, bytes | None]] = []
        self.wake: Callable[[], object] = lambda: None
        self.n_read = self.n_written = self.n_bad = self.n_removed = self.n_blocks = self.n_bytes = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.files

    def write(self, block_hash: bytes, data: Sequence[bytes]) -> bool:
        self.files[block_hash] = b"".join(data)
        return self.rng.random() < 0.9

    def read(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            data = self.files[block_hash]
            if self.rng.random() < self.share_damaged:
                data = None
                del self.files[block_hash]
            self.loaded.append((block_hash, data))
        clock = self.player.simulation.clock
        clock.call_at(clock.now(), lambda: None)  # wakes the scheduler

    def take_loaded(self) -> list[tuple[bytes, bytes | None]]:
        n = self.rng.randint(0, len(self.loaded))
        taken, self.loaded = self.loaded[:n], self.loaded[n:]
        if self.loaded:
            clock = self.player.simulation.clock
            clock.call_at(clock.now(), lambda: None)
        self.n_read += sum(data is not None for _, data in taken)
        return taken


class Peer:
    """Another server, and the wire to it: blocks arrive in pieces, late, too late, or not at all.

    A lease's `remote_engine_id` is the number of its request. Some leases grow, and say the first token with
    their last piece, or a wrong one that they cannot prove. What is after the last piece may be wrong.
    """

    FACTS = TransferFacts("a model", "a secret")

    def __init__(self, player: "Player", seed: int) -> None:
        self.player = player
        self.rng = random.Random(seed)
        self.n_fetched = self.n_states = self.n_in_part = 0
        self.under_way: list[list[int]] = []  # places
        self._place_of: dict[int, int] = {}  # by the id of its view
        self._views: list[memoryview] = []

    def view_of(self, place: int) -> memoryview:
        view = memoryview(bytearray(1))
        self._views.append(view)
        self._place_of[id(view)] = place
        return view

    def params(self, number: int, arrival: Arrival, block_size: int) -> KVTransferParams | None:
        """The lease of a prompt; None for a request that comes without."""
        if self.rng.random() < 0.4 or len(arrival.prompt) < block_size:
            return None
        n = len(arrival.prompt) // block_size
        if self.rng.random() < 0.1:
            n += 1  # which cannot be
        return self.FACTS.new_lease(engine_id=str(number), host="peer", port=7, n_blocks=n)

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
        player, clock = self.player, self.player.simulation.clock
        request = player.requests[int(params.remote_engine_id)]
        size = player.simulation.kv.block_size
        places = [self._place_of[id(view)] for (view,) in into]
        tokens = request.prompt_ids[: len(params.remote_block_ids) * size]
        assert digest == self.FACTS.digest(tokens, request.cache_salt)
        ok = self.rng.random() < 0.75
        n_written = len(places) if ok else self.rng.randint(0, len(places))
        grows = self.rng.random() < 0.5
        n_arrived = n_written if ok or grows else 0  # the others are not known to be whole
        at = clock.now()
        self.under_way.append(places)
        for i, place in enumerate(places[:n_written]):
            at += self.rng.choice((0.0, 0.0, 0.1, 2.0))
            positions = [*range((first + i) * size, (first + i + 1) * size)]
            if first + i == len(params.remote_block_ids):  # the state after the last block
                positions = [(first + i) * size - 1]
            content: list[tuple[object, ...]] = [
                (request.cache_salt, *request.prompt_ids[: position + 1]) for position in positions
            ]
            clock.call_at(at, partial(player.engine.host.__setitem__, place, content))
            if grows and i + 1 < n_arrived and self.rng.random() < 0.5:
                clock.call_at(at, partial(receiver.arrived, i + 1))
                clock.call_at(at + seconds_each, lambda: None)  # looks again
        if places and ok and grows:
            token_id, wrong = token_of(request, 0), self.rng.random() < 0.2
            proof = self.FACTS.with_first_token(params, token_id, request.prompt_ids, request.cache_salt)
            clock.call_at(at, partial(receiver.said, token_id + wrong, proof.first_token_proof))

        def end() -> None:
            self.under_way.remove(places)
            self.n_fetched += n_arrived
            self.n_in_part += n_arrived * (not ok)
            self.n_states += ok and first + len(places) > len(params.remote_block_ids)
            receiver.arrived(n_arrived)
            receiver.done(ok)

        clock.call_at(at + self.rng.choice((0.0, 0.5, 0.5, 30.0)), end)

    def close(self) -> None:
        pass


class Packed:
    """Copies of what blocks held, and of a state."""

    def __init__(self, contents: Sequence[Sequence[tuple[object, ...]]]) -> None:
        self.contents = [repr([*content]).encode() for content in contents]

    def settle(self) -> None:
        pass

    def parts(self, index: int) -> list[memoryview]:
        return [memoryview(self.contents[index])]


class Taker:
    """Another server, which fetches prompts from here, often while they are computed, or does not.

    It looks at every turn. What it gets has to be what the prompt's tokens gave, whatever became of the
    request; some takers leave in the middle.
    """

    def __init__(self, player: "Player", seed: int) -> None:
        self.player = player
        self.rng = random.Random(f"taker {seed}")
        kv, clock = player.simulation.kv, player.simulation.clock
        self.leases = Leases(
            kv,
            Peer.FACTS,
            self.pack,
            block_bytes=1,
            state_bytes=1,
            most_bytes=self.rng.choice((4, 20, 20)),
            seconds=self.rng.choice((3.0, 100.0)),
            engine_id="",
            address=("here", 7),
            clock=clock.now,
        )
        self.wished = {i for i in range(len(player.trace.arrivals)) if self.rng.random() < 0.6}
        self.early = {i for i in self.wished if self.rng.random() < 0.7}
        self.taken: dict[Request, tuple[Lease, list[bytes]]] = {}
        self.over: set[Request] = set()
        self.n_sent = self.n_before_the_end = self.n_broken = self.n_first_tokens = 0

    def wish(self, number: int) -> KVTransferParams | None:
        if number not in self.wished:
            return None
        return KVTransferParams(do_remote_decode=True, offer_early=number in self.early)

    def pack(self, blocks: Sequence[int], state: int | None) -> Packed:
        engine, size = self.player.engine, self.player.simulation.kv.block_size
        found = [[engine.content[b * size + i] for i in range(size)] for b in blocks]
        return Packed(found if state is None else [*found, [engine.states[state]]])

    def look(self) -> None:
        """Take leases that are offered, and what is ready of those that are taken."""
        self.leases.expire()
        for request in self.player.requests:
            params = request.kv_lease
            if params is None or request in self.taken or request in self.over or self.rng.random() < 0.3:
                continue
            if self.rng.random() < 0.2:
                self.over.add(request)  # nobody comes
                continue
            size = self.player.simulation.kv.block_size
            tokens = request.prompt_ids[: len(params.remote_block_ids) * size]
            lease = self.leases.take(params.remote_request_id, Peer.FACTS.digest(tokens, request.cache_salt))
            if lease is None:
                self.over.add(request)
            else:
                self.taken[request] = lease, []
        for request, (lease, found) in [*self.taken.items()]:
            ready = self.leases.wait(lease, len(found), 0)
            if ready is not None:
                self.n_before_the_end += not ready[1]
                found += [bytes(part) for i in range(len(found), ready[0]) for part in lease.parts(i)]
            leaves = self.rng.random() < 0.03
            if lease.over or leaves or (ready is not None and ready[1]):
                self.check(request, lease, found, whole=ready is not None and ready[1])
                self.leases.sent(lease)
                del self.taken[request]
                self.over.add(request)

    def check(self, request: Request, lease: Lease, found: Sequence[bytes], *, whole: bool) -> None:
        size, n = self.player.simulation.kv.block_size, lease.n_blocks
        expected = [
            [(request.cache_salt, *request.prompt_ids[: i + 1]) for i in range(first, first + size)]
            for first in range(0, n * size, size)
        ]
        if lease.n_parts > n:
            expected.append([(request.cache_salt, *request.prompt_ids[: n * size])])
        assert [*found] == [repr(each).encode() for each in expected[: len(found)]], "a wrong block was sent"
        self.n_sent += len(found)
        if not whole:
            self.n_broken += 1
            return
        assert len(found) == lease.n_parts
        assert request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        if lease.first_token is not None:
            assert lease.first_token[0] == token_of(request, 0)
            self.n_first_tokens += 1

    def rest(self) -> None:
        """Check that nothing is held once all requests have ended and all time is over."""
        for _ in range(200):
            self.look()
        assert not self.taken and not self.leases._growing
        self.leases.end_all()
        assert not self.leases.n_bytes


class CheckedEngine:
    """Checks each batch against a model of the cache, and passes it to the simulated engine."""

    def __init__(self, player: "Player") -> None:
        self.player = player
        self.engine = player.simulation.engine
        self.n_workers = self.engine.n_workers
        self.keeps_tokens = True
        self.in_flight: deque[Sequence[Row]] = deque()
        self.n_read = self.n_states_read = 0  # blocks and states from the host tier
        self.content: dict[int, tuple[object, ...]] = {}  # by slot: salt, and tokens up to this one
        self.states: dict[int, tuple[object, ...]] = {}  # likewise, of recurrent layers: rows, then snapshots
        # By place in the host's memory: a block's slots; after all blocks' places, a state alone.
        self.host: dict[int, list[tuple[object, ...]]] = {}

    def issue(self, rows: Sequence[Row]) -> Iteration:
        serving, kv = self.player.trace.serving, self.player.simulation.kv
        assert rows, "an empty batch"
        assert len(rows) <= serving.max_batch_size
        assert len({req for req, _ in rows}) == len(rows)
        assert sum(n for _, n in rows) <= serving.max_batch_tokens
        n_prompt = sum(n for req, n in rows if req.in_initiation)
        limit = serving.scheduling.prefill_tokens
        if serving.scheduling.chunked_prefill and limit is not None and n_prompt > limit:
            assert all(req.in_initiation for req in self.player.simulation.pool.admitted()), "decodes delayed"
        holders = Counter(
            block
            for req in {*self.player.simulation.pool.admitted(), *self.player.scheduler.leaving}
            if req.row >= 0
            for block in kv.blocks_of(req.row).tolist()
        )
        self.copy_host(kv, serving.block_size)
        for req, n in rows:
            assert 1 <= n <= req.n_to_compute
            assert n == req.n_to_compute or serving.scheduling.chunked_prefill
            if req.state is RequestState.RUNNING:
                assert serving.overlap and any(ran is req for ran, _ in self.in_flight[0])
                assert req.n_in_flight == 1 and req.n_tokens_issued < req.max_tokens
            else:
                assert not req.n_in_flight
            tokens = [*req.prompt_ids, *(token_of(req, i) for i in range(req.max_tokens))]
            blocks = kv.blocks_of(req.row).tolist()
            assert blocks == kv.block_table[req.row, : len(blocks)].tolist()
            slots = [b * serving.block_size + i for b in blocks for i in range(serving.block_size)]
            for position in range(req.n_computed):
                assert self.content[slots[position]] == (req.cache_salt, *tokens[: position + 1])
            for position in range(req.n_computed, req.n_computed + n):
                assert holders[blocks[position // serving.block_size]] == 1, "a block with two writers"
                self.content[slots[position]] = (req.cache_salt, *tokens[: position + 1])
        if kv.snapshots is not None:
            self.run_states(rows, kv)
        self.player.issued(rows)
        self.player.moment()
        iteration = self._call(lambda: self.engine.issue(rows))
        self.in_flight.append(rows)
        return iteration

    def run_states(self, rows: Sequence[Row], kv: KVManager) -> None:
        """Copy states, let each row take its tokens, and copy states again."""
        assert kv.snapshots is not None
        before, after, _ = kv.state_copies
        in_rows, snapshots = {req.row for req, _ in rows}, range(kv.n_rows, kv.n_rows + kv.snapshots.n)
        assert all(source in snapshots and into in in_rows for source, into in before)
        assert all(source in in_rows and into in snapshots for source, into in after)
        read_in = [
            (place, state - kv.n_blocks) for place, state in kv.host_copies.into if state >= kv.n_blocks
        ]
        for copies in ([*read_in, *before], after):
            assert len({into for _, into in copies}) == len(copies), "a state with two writers"
        self.copy_states(before)
        for req, n in rows:
            tokens = [*req.prompt_ids, *(token_of(req, i) for i in range(req.max_tokens))]
            if req.n_computed:
                assert self.states[req.row] == (req.cache_salt, *tokens[: req.n_computed])
            self.states[req.row] = (req.cache_salt, *tokens[: req.n_computed + n])
        self.copy_states(after)

    def copy_host(self, kv: KVManager, block_size: int) -> None:
        """Copy blocks and states out, and then others in."""
        out, into = kv.host_copies
        assert len({place for _, place in out}) == len(out) and len({block for _, block in into}) == len(into)
        for block, place in out:
            state = block - kv.n_blocks
            slots = range(block * block_size, (block + 1) * block_size)
            self.host[place] = [self.states[state]] if state >= 0 else [self.content[i] for i in slots]
        for place, block in into:
            state = block - kv.n_blocks
            if state >= 0:
                (self.states[state],) = self.host[place]
                self.n_states_read += 1
                continue
            for i in range(block_size):
                self.content[block * block_size + i] = self.host[place][i]
            self.n_read += 1
        for tier in kv.tiers:
            tier.n_issued += 1

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        self.states |= {into: self.states[source] for source, into in copies}

    def wait(self, iteration: Iteration, interrupted: Callable[[], bool]) -> Returned | None:
        self.player.moment()
        returned: Returned | None = self._call(lambda: self.engine.wait(iteration, interrupted))
        self.player.moment()
        if returned is not None:
            self.in_flight.popleft()
        return returned

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except EngineError:
            self.in_flight.clear()
            self.content.clear()
            self.states.clear()
            self.host.clear()
            raise


class Player:
    """Plays a trace, and checks the invariants in every turn."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.simulation = Simulation(trace.serving, n_workers=trace.n_workers, token=token_of)
        self.scheduler = self.simulation.scheduler
        self.engine = self.scheduler.engine = CheckedEngine(self)
        self.disk = Disk(self, len(trace.arrivals))
        kv = self.simulation.kv
        drawn = random.Random(f"costs {trace.arrivals}")
        if kv.host is not None and drawn.random() < 0.3:
            host, disk, peer = (drawn.choice((0.0, 0.5, 3.0)) for _ in range(3))
            kv.host.costs = TierCosts(
                block_size=kv.block_size,
                token=1.0,
                pair=0.05,
                host=host,
                disk=host + disk,
                peer=host + peer,
                state=drawn.choice((0.5, 4.0)),
            )
        blocks, states = None if kv.host is None else Memory(self, kv.host, 0), None
        if kv.host_states is not None:
            states = Memory(self, kv.host_states, trace.serving.n_host_blocks)
        if trace.has_disk and blocks is not None:
            of_states = None if states is None or kv.snapshots is None else (kv.snapshots, states)
            kv.disk = DiskTier(blocks.tier, self.disk, blocks, of_states)
        self.peer = Peer(self, len(trace.arrivals))
        self.begun: set[Request] = set()  # with a token of the peer
        self.arriving: ArrivingBlocks | None = None
        if trace.has_peer and blocks is not None:
            clock = self.simulation.clock
            self.arriving = kv.arriving = ArrivingBlocks(
                kv, Peer.FACTS, blocks, self.peer, seconds=8.0, clock=clock.now, state_places=states
            )
            self.note_begun(self.arriving)
        self.taker: Taker | None = None
        if trace.has_taker:
            self.taker = Taker(self, len(trace.arrivals))
            kv.leases = self.taker.leases
        self.n_moments = 0
        self.n_faults = 0
        self.asked_to_end: set[str] = set()
        self.n_issued = 0
        self.first_since = (-1, 0)  # the first request in the order, and iterations that ran without it
        self.overtaken: dict[int, set[int]] = {}  # by arrival: who came later and was admitted before
        self.requests: list[Request] = []
        for i, arrival in enumerate(trace.arrivals):
            request = Request(
                request_id=str(i),
                prompt_ids=arrival.prompt,
                max_tokens=len(arrival.prompt) + arrival.n_output,
                sampling=SamplingParams(max_tokens=arrival.n_output),
                seed=i,
                sink=Sink(self.moment),
                owner=arrival.owner,
                priority=arrival.priority,
                cache_salt=arrival.salt,
            )
            self.requests.append(request)
            if self.arriving is not None:
                request.kv_transfer = self.peer.params(i, arrival, kv.block_size)
                self.simulation.clock.call_at(arrival.time, partial(self.arriving.ask, request))
                self.simulation.clock.call_at(arrival.time + 8.0, lambda: None)  # looks again
            if self.taker is not None and request.kv_transfer is None:
                request.kv_transfer = self.taker.wish(i)
            self.simulation.add_at(arrival.time, request)

    def note_begun(self, arriving: ArrivingBlocks) -> None:
        step = arriving.step

        def noting() -> list[tuple[Request, int]]:
            begun = step()
            self.begun.update(req for req, _ in begun)
            return begun

        arriving.step = noting

    def moment(self) -> None:
        self.n_moments += 1
        for moment, i in self.trace.ends:
            if moment == self.n_moments and self.simulation.pool.end_named(str(i), FinishReason.CANCELLED):
                self.asked_to_end.add(str(i))
        if self.n_moments in self.trace.faults:
            self.simulation.engine.fail("issue" if self.n_moments % 2 else "wait")

    def issued(self, rows: Sequence[Row]) -> None:
        """Check that the first admitted request runs again within a bounded number of iterations.

        When it is ready it is in the next batch. While it is in flight, or waits for the slots of a request
        in flight, one other batch may be issued for each place in flight. With whole prompts, one batch of
        prompts alone may come between two decodes.
        """
        self.n_issued += 1
        admitted = [req for req in self.simulation.pool.admitted() if req.ending is None]
        going_on = [req for req in admitted if req.n_tokens_issued < req.max_tokens]
        if not going_on:
            return
        first = min(going_on, key=lambda req: (req.rank, req.arrival))
        number, n_without = self.first_since
        n_without = n_without + 1 if number == first.arrival else 0
        if any(req is first for req, _ in rows):
            n_without = 0
        assert n_without <= 2 * (self.trace.n_workers + 2), "the first request does not advance"
        self.first_since = first.arrival, n_without

    def play(self) -> None:
        n_tokens = sum(a.n_output + len(a.prompt) for a in self.trace.arrivals)
        limit = 50 + 20 * (n_tokens + len(self.trace.arrivals)) * len(self.trace.arrivals)
        turns = self.simulation.steps()
        n_turns = 0
        while True:
            self.moment()
            try:
                next(turns)
            except StopIteration:
                break
            except EngineError:
                self.n_faults += 1
                fail_all(self.scheduler)
                turns = self.simulation.steps()
            self.check_turn()
            if self.taker is not None:
                self.taker.look()
            n_turns += 1
            assert n_turns <= limit, "no end in sight: a deadlock"
        self.check_rest()

    def check_turn(self) -> None:
        kv, scheduler, serving = self.simulation.kv, self.scheduler, self.trace.serving
        admitted = self.simulation.pool.admitted()
        holding = [*admitted, *scheduler.leaving]
        held = {block for req in holding for block in kv.blocks_of(req.row).tolist()}
        assert len({req.row for req in holding}) == len(holding)
        assert len(holding) + kv.n_free_rows == kv.n_rows
        assert len(held) + kv.n_free_blocks == kv.n_blocks, "a block was lost"
        fetches = [] if self.arriving is None else [*self.arriving._fetches.values()]
        if kv.host is not None:
            places = [*kv.host._place_of.values(), *kv.host._free]
            places += [t.place for fetch in fetches for t in fetch.targets if t.tier is kv.host]
            assert sorted(places) == list(range(serving.n_host_blocks)), "a place was lost"
        if kv.host_states is not None:
            places = [*kv.host_states._place_of.values(), *kv.host_states._free]
            places += [t.place for fetch in fetches for t in fetch.targets if t.tier is kv.host_states]
            assert sorted(places) == list(range(serving.n_host_states)), "a state's place was lost"
        assert scheduler.n_rsrv == len(held) * serving.block_size <= serving.n_slots
        assert len(admitted) <= serving.max_batch_size * self.trace.n_workers
        if not serving.scheduling.prefix_caching:
            assert sum(len(kv.blocks_of(req.row)) for req in holding) == len(held)
        waiting = [
            req
            for req in self.simulation.pool.in_arrival_order()
            if req.row < 0 and (req.kv_transfer is None or not req.kv_transfer.do_remote_prefill)
        ]
        if serving.scheduling.scheduling_policy == "fcfs" and admitted and waiting:
            assert max(req.arrival for req in admitted) < min(req.arrival for req in waiting), "overtaken"
        if serving.scheduling.scheduling_policy == "longest-prefix":
            for late in waiting:
                if not late.n_preempted:
                    earlier = self.overtaken.setdefault(late.arrival, set())
                    earlier.update(req.arrival for req in admitted if req.arrival > late.arrival)
                    assert len(earlier) < WINDOW, "overtaken by more than a window"
        if not serving.scheduling.on_demand:
            assert not scheduler.n_preemptions, "full reservation promises none"

    def check_rest(self) -> None:
        kv = self.simulation.kv
        assert (len(self.simulation.pool), self.scheduler.n_rsrv, self.scheduler.n_scheduled) == (0, 0, 0)
        assert (kv.n_free_blocks, kv.n_free_rows) == (kv.n_blocks, kv.n_rows)
        assert not self.simulation.refused
        if self.taker is not None:
            self.taker.rest()
        if kv.snapshots is not None:
            assert len(kv.snapshots) == len(kv.snapshots.all_named()), "a snapshot that nobody can find"
            kv.forget()
            assert sorted(kv.snapshots._free) == list(range(kv.n_rows, kv.n_rows + kv.snapshots.n))
        by_request: dict[str, list[Shown]] = {req.request_id: [] for req in self.requests}
        for delivery in self.simulation.deliveries:
            by_request[delivery[0].request_id].append(delivery)
        for request, arrival in zip(self.requests, self.trace.arrivals, strict=True):
            deliveries = by_request[request.request_id]
            tokens = [token_id for _, token_id, _ in deliveries if token_id is not None]
            if request in self.begun:
                tokens.insert(0, token_of(request, 0))
            assert tokens == request.output_ids == [token_of(request, i) for i in range(len(tokens))]
            reasons = [reason for _, _, reason in deliveries]
            assert reasons[-1] is request.finish_reason is not None
            assert reasons[:-1] == [None] * (len(reasons) - 1), "ended more than once"
            match request.finish_reason:
                case FinishReason.CANCELLED:
                    assert request.request_id in self.asked_to_end
                case FinishReason.ERROR:
                    assert self.n_faults == 1
                case reason:
                    assert reason is FinishReason.LENGTH and len(tokens) == arrival.n_output
            assert request.n_cached < len(request.prompt_ids) + (request in self.begun)


# Of a model with recurrent layers.
STATES: dict[str, Any] = {"n_snapshots": 4, "n_host_states": 8}


@pytest.mark.parametrize("states", [{}, STATES], ids=["", "states"])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_come_back_from_a_disk_with_what_they_held(
    overlap: bool, lag: int, states: dict[str, Any]
) -> None:
    """The devices have room for one prompt, the host for two, and the disk for all but what is damaged."""
    prompts = [tuple(100 * of + i for i in range(33)) for of in range(5)]
    arrivals = [Arrival(300.0 * i, prompts[i % 5], 4, (), "A", 0) for i in range(15)]
    serving = ServingConfig(
        max_batch_size=2,
        n_slots=40,
        block_size=4,
        max_batch_tokens=16,
        overlap=overlap,
        n_host_blocks=18,
        **states,
        scheduling=SchedulingConfig(snapshot_blocks=4),
    )
    player = Player(Trace(serving, 1, tuple(arrivals), (), (), has_disk=True))
    player.disk.lag = lag
    player.play()
    assert player.disk.n_read > 20 and player.engine.n_read > 20
    assert (player.engine.n_states_read > 4) == bool(states)
    assert sum(req.n_cached for req in player.requests[10:]) > 80


def test_a_tenant_s_prompts_are_found_by_its_salt_alone() -> None:
    prompt = tuple(range(33))
    others = [tuple(100 * of + i for i in range(33)) for of in range(1, 4)]
    asked = [(prompt, "a"), *((other, "a") for other in others), (prompt, "b"), (prompt, "a"), (prompt, "b")]
    arrivals = [Arrival(300.0 * i, each, 1, (salt,), "A", 0) for i, (each, salt) in enumerate(asked)]
    serving = ServingConfig(
        max_batch_size=2,
        n_slots=40,
        block_size=4,
        max_batch_tokens=16,
        n_host_blocks=18,
        **STATES,
        scheduling=SchedulingConfig(snapshot_blocks=4),
    )
    player = Player(Trace(serving, 1, tuple(arrivals), (), (), has_disk=True))
    player.disk.share_damaged = 0.0
    assert player.simulation.kv.host is not None
    player.simulation.kv.host.costs = None
    player.play()
    assert [req.n_cached for req in player.requests[4:]] == [0, 32, 32]


def test_a_prompt_on_the_disk_does_not_wait_for_places_that_the_last_iteration_read() -> None:
    """The second prompt's one iteration reads in every place; nothing runs when the first comes again."""
    prompts = [tuple(100 * of + i for i in range(17)) for of in range(3)]
    arrivals = [Arrival(300.0 * i, prompts[of], 1, (), "A", 0) for i, of in enumerate((0, 1, 2, 1, 0))]
    serving = ServingConfig(
        max_batch_size=1,
        n_slots=20,
        block_size=4,
        max_batch_tokens=20,
        n_host_blocks=4,
        scheduling=SchedulingConfig(),
    )
    player = Player(Trace(serving, 1, tuple(arrivals), (), (), has_disk=True))
    player.disk.share_damaged = 0.0
    player.play()
    assert [req.n_cached for req in player.requests] == [0, 0, 0, 16, 8]
    assert player.disk.n_read == 2, "half of the places are for what comes from the disk"


@pytest.mark.parametrize("states", [{}, {"n_snapshots": 4, "n_host_states": 24}], ids=["", "states"])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_arrive_from_another_server_or_are_computed(overlap: bool, states: dict[str, Any]) -> None:
    prompts = [tuple(100 * of + i for i in range(33)) for of in range(40)]
    arrivals = [Arrival(9.0 * i, prompts[i], 4, ("key", str(i % 2)), "A", 0) for i in range(40)]
    serving = ServingConfig(
        max_batch_size=2,
        n_slots=80,
        block_size=4,
        max_batch_tokens=16,
        overlap=overlap,
        n_host_blocks=100,
        **states,
        scheduling=SchedulingConfig(),
    )
    player = Player(Trace(serving, 1, tuple(arrivals), (), (), has_peer=True))
    player.play()
    assert player.arriving is not None and player.arriving.n_failed > 4
    assert player.peer.n_fetched > 60 and player.engine.n_read > 60
    assert (player.peer.n_states > 7) == (player.engine.n_states_read > 7) == bool(states)
    assert sum(req.n_cached for req in player.requests) > 4 * 60


def play_all(switches: tuple[bool, bool, str, str], n_traces: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(n_traces):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serving_policy, "_WINDOW", WINDOW)
            player = Player(random_trace(seed, switches))
        try:
            player.play()
        except BaseException as error:
            error.add_note(f"random_trace({seed}, {switches})")
            raise
        prefixes = player.simulation.kv.prefixes
        seen["overtaken"] += sum(map(len, player.overtaken.values()))
        seen["preemptions"] += player.scheduler.n_preemptions
        seen["cached"] += sum(req.n_cached for req in player.requests)
        snapshots = player.simulation.kv.snapshots
        seen["snapshots used"] += 0 if snapshots is None else snapshots.n_used
        seen["snapshots evicted"] += 0 if snapshots is None else snapshots.n_evicted
        seen["read in"] += player.engine.n_read
        seen["states read in"] += player.engine.n_states_read
        seen["arrived"] += player.peer.n_fetched
        seen["states arrived"] += player.peer.n_states
        seen["arrived in part"] += player.peer.n_in_part
        seen["begun elsewhere"] += len(player.begun)
        if (taker := player.taker) is not None:
            seen["sent"] += taker.n_sent
            seen["sent before the end"] += taker.n_before_the_end
            seen["sent in part"] += taker.n_broken
            seen["first tokens sent"] += taker.n_first_tokens
        seen["evictions"] += prefixes.n_evictions if prefixes is not None else 0
        limit = player.trace.serving.max_batch_tokens
        seen["prompts longer than an iteration"] += sum(len(a.prompt) > limit for a in player.trace.arrivals)
        seen["chunks"] += sum(req.n_iterations > len(req.output_ids) + 1 for req in player.requests)
    return seen


@pytest.mark.long
@pytest.mark.parametrize("switches", SWITCHES)
def test_random_traces_keep_every_invariant(switches: tuple[bool, bool, str, str]):
    seen = play_all(switches, N_TRACES)
    chunked, prefixes, reservation, order = switches
    assert (seen["overtaken"] > 20) == (order == "longest-prefix")
    # The traces have seen what they are for.
    assert (seen["cached"] > 100 and seen["evictions"] > 100) == prefixes
    # Whole prompts leave a snapshot only where they end at a border.
    least = 100 if chunked else 20
    assert (seen["snapshots used"] > least and seen["snapshots evicted"] > 100) == prefixes
    assert (seen["read in"] > 20) == (seen["arrived"] > 20) == prefixes, seen
    assert (seen["states read in"] > 20) == (seen["states arrived"] > 5) == prefixes, seen
    assert (seen["arrived in part"] > 2) == (seen["begun elsewhere"] > 20) == prefixes, seen
    assert seen["sent"] > 200 and seen["sent in part"] > 10 and seen["first tokens sent"] > 20, seen
    assert (seen["sent before the end"] > 20) == chunked, seen
    assert (seen["preemptions"] > 50) == (reservation == "on-demand")
    assert not chunked or seen["chunks"] > 50
    assert (seen["prompts longer than an iteration"] > 50) == chunked


@pytest.mark.parametrize("switches", SWITCHES)
def test_some_random_traces_keep_every_invariant(switches: tuple[bool, bool, str, str]):
    play_all(switches, 20)


@pytest.mark.parametrize(
    ("seed", "chunked", "prefixes"), [(1475, False, True), (2439, False, False), (2439, True, False)]
)
def test_none_is_preempted_while_a_later_one_in_flight_keeps_its_slots(
    seed: int, chunked: bool, prefixes: bool
) -> None:
    Player(random_trace(seed, (chunked, prefixes, "on-demand", "fcfs"))).play()
