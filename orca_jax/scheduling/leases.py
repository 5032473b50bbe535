"""Leases: the blocks of finished prompts, kept in host memory until another server fetches them.

When a request with `do_remote_decode` ends, its prompt's full blocks are gathered from the devices and
leased; with recurrent layers, the blocks up to the last snapshot, and the snapshot. The response names the
lease. It ends when it is taken, after its time, or when newer leases need its memory; the other server then
computes the prompt itself.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.request.request import FinishReason, Request
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

    With recurrent layers the state after them is one more of its `n_parts`.
    """

    params: KVTransferParams
    digest: bytes
    blocks: PackedBlocks
    n_bytes: int
    expires: float
    n_parts: int

    @property
    def n_blocks(self) -> int:
        return len(self.params.remote_block_ids)


class Leases:
    """The leases of an engine: at most `most_bytes`, each for `seconds`.

    `pack` starts gathering blocks, and the state after them if there is one; the scheduler's thread calls it.
    A state has `state_bytes`. `address` is where other servers take leases. `n_granted`, `n_taken` and
    `n_expired` count leases; the last has those that made room for others as well.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv, self._facts, self._pack = kv, facts, pack
        self._block_bytes, self._state_bytes = block_bytes, state_bytes
        self._most_bytes, self._seconds = most_bytes, seconds
        self._engine_id, self.address = engine_id, address
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: OrderedDict[str, Lease] = OrderedDict()  # by name, oldest first
        self._newest: Lease | None = None
        self._stopped = False
        self.n_bytes = 0  # of leases, and of those that are being sent
        self.n_granted = self.n_taken = self.n_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, req: Request, reason: FinishReason) -> None:
        """Lease the blocks of a prompt, if its request asks for it.

        Their keys and values are computed and not yet overwritten. The other server may begin its output with
        the token that was sampled here, unless the output ended with it for the finish `reason`.

        For the scheduler's thread, before the request's row is released.
        """
        kv, wish = self._kv, req.kv_transfer
        if wish is None or not wish.do_remote_decode:
            return
        gives_token = reason is FinishReason.LENGTH and begins_with_a_known_token(req)
        n_blocks = len(req.prompt_ids) // kv.block_size
        state: int | None = None
        if kv.snapshots is not None:
            hashes = hash_prompt(req, kv)
            # Without the token after the prompt, the other server computes at least the prompt's last token.
            n_blocks = kv.snapshots.longest(
                hashes, (len(req.prompt_ids) - (not gives_token)) // kv.block_size
            )
            state = kv.snapshots.place_of(hashes[n_blocks - 1]) if n_blocks else None
        n_bytes = n_blocks * self._block_bytes + (0 if state is None else self._state_bytes)
        if self._stopped or not n_blocks or req.kind.forks:
            return
        if self._newest is not None:
            self._newest.blocks.settle()  # so that the devices hold the copies of one prompt at most
        with self._lock:
            self._expire()
            while self._leases and self.n_bytes + n_bytes > self._most_bytes:
                self._drop(next(iter(self._leases)))
            if self.n_bytes + n_bytes > self._most_bytes:
                return
            self.n_bytes += n_bytes
        host, port = self.address
        params = self._facts.new_lease(engine_id=self._engine_id, host=host, port=port, n_blocks=n_blocks)
        tokens = req.prompt_ids[: n_blocks * kv.block_size]
        salt = kv.owner_of(req.cache_salt)
        digest = self._facts.digest(tokens, salt)
        if gives_token:
            params = self._facts.with_first_token(params, req.output_ids[0], req.prompt_ids, salt)
        blocks = self._pack(kv.block_table[req.row, :n_blocks].tolist(), state)
        n_parts = n_blocks + (state is not None)
        lease = self._newest = Lease(params, digest, blocks, n_bytes, self._clock() + self._seconds, n_parts)
        with self._lock:
            self._leases[params.remote_request_id] = lease
            self.n_granted += 1
        req.kv_lease = params

    def take(self, name: str, digest: bytes) -> Lease | None:
        """End the lease of this name and digest, for the caller to send; `sent` must follow. Any thread."""
        with self._lock:
            self._expire()
            lease = self._leases.get(name)
            if lease is None or lease.digest != digest:
                return None
            self.n_taken += 1
            return self._leases.pop(name)

    def sent(self, lease: Lease) -> None:
        """Give the memory of a lease back that was taken."""
        with self._lock:
            self._give_back(lease)

    def expire(self) -> None:
        """End the leases whose time is over. Any thread, now and then."""
        with self._lock:
            self._expire()

    def stop(self) -> None:
        """End all leases, and grant no more: the engine has other weights, or closes."""
        self._stopped = True
        self.end_all()

    def end_all(self) -> None:
        """End all leases that nobody has taken."""
        with self._lock:
            while self._leases:
                self._drop(next(iter(self._leases)))

    def _expire(self) -> None:
        now = self._clock()
        while self._leases and next(iter(self._leases.values())).expires <= now:
            self._drop(next(iter(self._leases)))

    def _drop(self, name: str) -> None:
        self.n_expired += 1
        self._give_back(self._leases.pop(name))

    def _give_back(self, lease: Lease) -> None:
        self.n_bytes -= lease.n_bytes
        if self._newest is lease:
            self._newest = None
