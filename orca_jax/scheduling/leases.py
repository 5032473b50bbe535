"""Leases: the blocks of prompts, kept in host memory until another server fetches them.

When a request with `do_remote_decode` ends, its prompt's full blocks are gathered from the devices and
leased; with recurrent layers, the blocks up to the last snapshot, and the snapshot. The response names the
lease. It ends when it is taken, after its time, or when newer leases need its memory; the other server then
computes the prompt itself.

With `offer_early` the lease begins with the prompt's first iteration, and grows with each: its blocks are
gathered right behind the iteration that computes them, so that the other server fetches them while later
chunks are computed. It is whole once the request has ended with its output, and over if that ended otherwise.
"""

import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.request.request import FinishReason, Request, Row
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.prefix_lookup import begins_with_a_known_token, hash_prompt


class PackedBlocks(Protocol):
    """Blocks on their way from the devices to host memory, or there."""

    def settle(self) -> None:
        """Wait until the blocks are in host memory, and free their memory on the devices."""
        ...

    def parts(self, index: int) -> Sequence[memoryview]:
        """The bytes of a block, or of the state after the last one."""
        ...


@dataclass(slots=True, eq=False)
class Lease:
    """The first `n_blocks` blocks of a prompt, for whoever knows its name and `digest`.

    With recurrent layers the state after them is one more of its `n_parts`. Its `pieces` come with the index
    of their first part. The first `n_ready` parts may be sent, and `first_token` is known, if it is to be
    given, once the lease is `whole`. No more comes once it is `over`.
    """

    params: KVTransferParams
    digest: bytes
    n_bytes: int
    expires: float
    n_parts: int
    pieces: list[tuple[int, PackedBlocks]] = field(default_factory=list[tuple[int, PackedBlocks]])
    n_packed: int = 0
    n_ready: int = 0
    whole: bool = False
    over: bool = False
    first_token: tuple[int, str] | None = None  # and its proof

    @property
    def n_blocks(self) -> int:
        return len(self.params.remote_block_ids)

    def parts(self, index: int) -> Sequence[memoryview]:
        """The bytes of a block, or of the state after the last one. Waits until they are in host memory."""
        first, piece = next(each for each in reversed(self.pieces) if each[0] <= index)
        return piece.parts(index - first)


class Leases:
    """The leases of an engine: at most `most_bytes`, each for `seconds`.

    `pack` starts gathering blocks, and the state after them if there is one; the scheduler's thread calls it.
    The devices hold the copies of the newest whole prompt, or of `n_in_flight` iterations' chunks. A state
    has `state_bytes`. `address` is where other servers take leases. `n_granted`, `n_taken` and `n_expired`
    count leases; the last has those that made room for others, and those that ended unfinished, as well.
    """

    def __init__(
        self,
        kv: KVManager,
        facts: TransferFacts,
        pack: Callable[[Sequence[int], int | None], PackedBlocks],
        *,
        block_bytes: int,
        state_bytes: int = 0,
        most_bytes: int,
        seconds: float,
        engine_id: str,
        address: tuple[str, int],
        n_in_flight: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv, self._facts, self._pack = kv, facts, pack
        self._block_bytes, self._state_bytes = block_bytes, state_bytes
        self._most_bytes, self._seconds = most_bytes, seconds
        self._engine_id, self.address = engine_id, address
        self._clock, self._n_in_flight = clock, n_in_flight
        self._changed = threading.Condition()
        self._leases: OrderedDict[str, Lease] = OrderedDict()  # by name, the first to expire first
        self._growing: dict[Request, Lease] = {}  # also those that are taken, or over
        # For each iteration; a lease that ends frees its own.
        self._unsettled: deque[list[weakref.ref[PackedBlocks]]] = deque()
        self._stopped = False
        self.n_bytes = 0  # of leases, and of those that are being sent
        self.n_granted = self.n_taken = self.n_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def offer(self, rows: Sequence[Row]) -> list[Request]:
        """Lease the full blocks that an iteration computes of prompts with `offer_early`.

        Call it right after the iteration is issued, on the scheduler's thread. Returns the requests whose
        leases are new.
        """
        offered: list[Request] = []
        packed: list[weakref.ref[PackedBlocks]] = []
        for req, _ in rows:
            if req.kv_transfer is None or not req.kv_transfer.offer_early:
                continue
            lease = self._growing.get(req)
            if lease is None:
                if (lease := self._begin(req)) is None:
                    continue
                offered.append(req)
            n = min(req.n_computed // self._kv.block_size, lease.n_blocks)
            if n <= lease.n_packed or lease.over:
                continue
            if not packed:
                self._settle(self._n_in_flight - 1)
            piece = self._pack(self._kv.block_table[req.row, lease.n_packed : n].tolist(), None)
            packed.append(weakref.ref(piece))
            # The last blocks and the first token may be sent together.
            self._grow(lease, piece, n, n if req.n_computed < len(req.prompt_ids) else lease.n_ready)
        if packed:
            self._unsettled.append(packed)
        return offered

    def grant(self, req: Request, reason: FinishReason) -> None:
        """Lease the blocks of a prompt whose request ends, if it asks for it, or finish its lease.

        Their keys and values are computed and not yet overwritten. The other server may begin its output with
        the token that was sampled here, unless the output ended with it for the finish `reason`.

        For the scheduler's thread, before the request's row is released.
        """
        kv, wish = self._kv, req.kv_transfer
        lease = self._growing.pop(req, None)
        if reason is not FinishReason.LENGTH and reason is not FinishReason.STOP:
            if lease is not None:
                self._end(lease)
            return
        if wish is None or not wish.do_remote_decode or self._stopped or req.kind.forks:
            return
        gives_token = reason is FinishReason.LENGTH and begins_with_a_known_token(req)
        if req.kv_lease is not None:
            if lease is not None:
                self._finish(lease, req, gives_token=gives_token)
            return
        n_blocks = len(req.prompt_ids) // kv.block_size
        state: int | None = None
        if kv.snapshots is not None:
            hashes = hash_prompt(req, kv)
            # Without the token after the prompt, the other server computes at least the prompt's last token.
            n_blocks = kv.snapshots.longest(
                hashes, (len(req.prompt_ids) - (not gives_token)) // kv.block_size
            )
            state = kv.snapshots.place_of(hashes[n_blocks - 1]) if n_blocks else None
        lease = self._new_lease(req, n_blocks, has_state=state is not None)
        if lease is None:
            return
        self._settle(0)
        piece = self._pack(kv.block_table[req.row, :n_blocks].tolist(), state)
        self._unsettled.append([weakref.ref(piece)])
        self._grow(lease, piece, n_blocks, n_blocks)
        self._finish(lease, req, gives_token=gives_token)
        params = lease.params
        if lease.first_token is not None:
            token_id, proof = lease.first_token
            params = replace(params, first_token_id=token_id, first_token_proof=proof)
        req.kv_lease = params

    def take(self, name: str, digest: bytes) -> Lease | None:
        """End the lease of this name and digest, for the caller to send; `sent` must follow. Any thread."""
        with self._changed:
            self._expire()
            lease = self._leases.get(name)
            if lease is None or lease.digest != digest:
                return None
            self.n_taken += 1
            return self._leases.pop(name)

    def wait(self, lease: Lease, n: int, seconds: float) -> tuple[int, bool] | None:
        """Wait until more than the first `n` parts of a taken lease may be sent, or it is whole. Any thread.

        Returns how many may be sent, and whether it is whole; None if no more comes, or not in this time.
        """
        with self._changed:
            self._changed.wait_for(lambda: lease.over or lease.whole or lease.n_ready > n, seconds)
            if lease.over or not (lease.whole or lease.n_ready > n):
                return None
            return lease.n_ready, lease.whole

    def sent(self, lease: Lease) -> None:
        """Give the memory of a lease back that was taken."""
        with self._changed:
            self._give_back(lease)

    def expire(self) -> None:
        """End the leases whose time is over. Any thread, now and then."""
        with self._changed:
            self._expire()

    def stop(self) -> None:
        """End all leases, and grant no more: the engine has other weights, or closes."""
        self._stopped = True
        for lease in self._growing.values():
            self._end(lease)
        self.end_all()

    def end_all(self) -> None:
        """End all leases that nobody has taken."""
        with self._changed:
            while self._leases:
                self._drop(next(iter(self._leases)))

    def _begin(self, req: Request) -> Lease | None:
        """The lease of a prompt whose first iteration is issued; None if it has to wait for its end.

        With recurrent layers only the end tells where the last snapshot is.
        """
        kv = self._kv
        if self._stopped or req.kv_lease is not None or req.output_ids or req.kind.forks:
            return None
        if kv.snapshots is not None:
            return None
        lease = self._new_lease(req, len(req.prompt_ids) // kv.block_size, has_state=False)
        if lease is not None:
            self._growing[req] = lease
            req.kv_lease = lease.params
        return lease

    def _new_lease(self, req: Request, n_blocks: int, *, has_state: bool) -> Lease | None:
        """A lease of a prompt's first blocks, still without them; None if there is no room."""
        if not n_blocks:
            return None
        n_bytes = n_blocks * self._block_bytes + (self._state_bytes if has_state else 0)
        host, port = self.address
        params = self._facts.new_lease(engine_id=self._engine_id, host=host, port=port, n_blocks=n_blocks)
        tokens = req.prompt_ids[: n_blocks * self._kv.block_size]
        digest = self._facts.digest(tokens, self._kv.owner_of(req.cache_salt))
        with self._changed:
            self._expire()
            while self._leases and self.n_bytes + n_bytes > self._most_bytes:
                self._drop(next(iter(self._leases)))
            if self.n_bytes + n_bytes > self._most_bytes:
                return None
            self.n_bytes += n_bytes
            self.n_granted += 1
            lease = Lease(params, digest, n_bytes, self._clock() + self._seconds, n_blocks + has_state)
            self._leases[params.remote_request_id] = lease
            return lease

    def _grow(self, lease: Lease, piece: PackedBlocks, n_packed: int, n_ready: int) -> None:
        """Add the blocks up to `n_packed` to a lease, of which `n_ready` may be sent now."""
        with self._changed:
            if lease.over:
                return
            lease.pieces.append((lease.n_packed, piece))
            lease.n_packed, lease.n_ready = n_packed, n_ready
            self._renew(lease)

    def _finish(self, lease: Lease, req: Request, *, gives_token: bool) -> None:
        """Let a lease whose blocks are all packed be sent to its end."""
        if gives_token:
            salt = self._kv.owner_of(req.cache_salt)
            params = self._facts.with_first_token(lease.params, req.output_ids[0], req.prompt_ids, salt)
            lease.first_token = req.output_ids[0], params.first_token_proof
        assert lease.over or lease.n_packed == lease.n_blocks, "an output without its prompt"
        with self._changed:
            lease.n_ready, lease.whole = lease.n_parts, True
            self._renew(lease)

    def _end(self, lease: Lease) -> None:
        """End a lease that does not become whole."""
        with self._changed:
            lease.over = True
            if lease.params.remote_request_id in self._leases:
                self._drop(lease.params.remote_request_id)
            self._changed.notify_all()

    def _settle(self, n: int) -> None:
        """Wait until the devices hold the copies of `n` iterations at most."""
        while len(self._unsettled) > n:
            for each in self._unsettled.popleft():
                if (piece := each()) is not None:
                    piece.settle()

    # Under the lock.

    def _renew(self, lease: Lease) -> None:
        """Begin the time of a lease again, and wake who sends it."""
        lease.expires = self._clock() + self._seconds
        if lease.params.remote_request_id in self._leases:
            self._leases.move_to_end(lease.params.remote_request_id)
        self._changed.notify_all()

    def _expire(self) -> None:
        now = self._clock()
        while self._leases and next(iter(self._leases.values())).expires <= now:
            self._drop(next(iter(self._leases)))

    def _drop(self, name: str) -> None:
        self.n_expired += 1
        self._give_back(self._leases.pop(name))

    def _give_back(self, lease: Lease) -> None:
        self.n_bytes -= lease.n_bytes
        lease.over = True
        lease.pieces.clear()
