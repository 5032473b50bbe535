"""The Attention K/V manager: which blocks of slots, and which row, each request holds (ORCA 4.2, 5).

A slot is room for one token's key and value in every layer. A block is `block_size` contiguous slots, the
unit of allocation. In Algorithm 1 a request gets all blocks for its `max_tokens` when it is admitted, so an
admitted request can never run out of slots. With reservation on demand it gets the blocks of its prompt, and
grows. With a prefix cache it may share its first blocks with other requests. At its end it returns all at
once.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

from orca_jax.request.request import FinishReason, Request, Row
from orca_jax.scheduling.beam_blocks import BeamBlocks
from orca_jax.scheduling.blocks import Blocks
from orca_jax.scheduling.disk_tier import DiskTier
from orca_jax.scheduling.host_tier import NO_HOST_COPIES, HostCopies, HostTier
from orca_jax.scheduling.snapshots import NO_STATE_COPIES, StateCopies


class Arriving(Protocol):
    """Blocks that other servers send (arriving_blocks.py)."""

    wake: Callable[[], object]
    n_asked: int
    n_failed: int
    n_blocks: int

    @property
    def n_under_way(self) -> int: ...

    def ask(self, req: Request) -> None: ...

    def first_token(self, req: Request) -> int | None: ...

    def step(self) -> Sequence[tuple[Request, int]]: ...

    def awaits(self, req: Request) -> bool: ...

    def stop(self) -> None: ...


class Leasing(Protocol):
    """Blocks that other servers fetch (leases.py)."""

    n_granted: int
    n_taken: int
    n_expired: int
    n_bytes: int

    def offer(self, rows: Sequence[Row]) -> Sequence[Request]: ...

    def grant(self, req: Request, reason: FinishReason) -> None: ...

    def stop(self) -> None: ...


class KVManager(Blocks):
    """The blocks of an engine's requests; see Blocks for the sizes.

    Blocks of different `namespace`s, such as versions of the weights, never have the same hash in the prefix
    cache, nor do blocks of engines with different `hash_seed`s, which is set before the first request. So is
    `tenants`, the texts that stand for tenants in hashes where their names do not outlive the engine.
    """

    namespace = ""
    hash_seed = ""
    tenants: Mapping[str, str] = MappingProxyType({})
    # These three are set before the first request.
    disk: DiskTier | None = None  # below `host`
    arriving: Arriving | None = None  # blocks from other servers
    leases: Leasing | None = None  # blocks for other servers
    copies: Sequence[tuple[int, int]] = ()  # blocks (from, to) to copy before the next issued iteration

    def owner_of(self, cache_salt: Sequence[str]) -> tuple[str, ...]:
        """The texts that stand for a request's `cache_salt` in hashes: its tenant's, and the others."""
        return (*(self.tenants.get(name, name) for name in cache_salt[:1]), *cache_salt[1:])

    @property
    def state_copies(self) -> StateCopies:
        """Recurrent layers' states to copy before and after the next issued iteration."""
        copies = NO_STATE_COPIES if self.snapshots is None else self.snapshots.copies
        drafts = self.draft_states
        if drafts is None:
            return copies
        return StateCopies([*drafts.undone, *copies.before], copies.after, drafts.kept)

    @property
    def host_copies(self) -> HostCopies:
        """Blocks to copy to the host's memory and from it before the next issued iteration.

        States of recurrent layers come after the blocks, and their places after those of blocks.
        """
        if self.host is None:
            return NO_HOST_COPIES
        copies, states = self.host.copies, self.host_states
        if states is None or states.copies is NO_HOST_COPIES:
            return copies
        n_blocks, n_places = self.n_blocks, self.host.n
        out = [(n_blocks + state, n_places + place) for state, place in states.copies.out]
        into = [(n_places + place, n_blocks + row) for place, row in states.copies.into]
        return HostCopies([*copies.out, *out], [*copies.into, *into])

    @property
    def tiers(self) -> list[HostTier]:
        """The host's memory, of blocks and of states."""
        return [tier for tier in (self.host, self.host_states) if tier is not None]

    @cached_property
    def beams(self) -> BeamBlocks:
        """The blocks of beam searches."""
        return BeamBlocks(self)

    def n_released(self, rows: Sequence[int]) -> int:
        """The number of blocks that the release of these rows would free: no other request holds them.

        The row of a beam search's request means all rows of the search.
        """
        if self.prefixes is None and not self.beams:
            return sum(len(self.blocks_of(row)) for row in rows)
        holders = Counter(block for row in rows for block in self.beams.held(row).tolist())
        return sum(map(self.beams.promised, rows)) + self.n_freed(holders)

    def reserve(self, max_tokens: int, n_fixed: int = 0) -> int:
        """Allocate a row of `n_fixed` blocks, then blocks for `max_tokens` tokens; returns the row.

        The scheduler has checked that they are free (Algorithm 1, line 25).
        """
        self.check(0, self.n_blocks_for(max_tokens))
        row = self.start_row()
        if n_fixed:
            assert n_fixed <= self.max_encoder_blocks, f"{n_fixed} fixed blocks, of {self.max_encoder_blocks}"
            self.allocate(row, 0, n_fixed)
            self.encoder_blocks[row] = n_fixed
        self.grow(row, max_tokens)
        return row

    def reserve_sharing(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """Reserve for several requests, each with its number of tokens and the cached blocks it begins with.

        All cached blocks are held before anything is allocated, because allocation may evict blocks.
        """
        rows = [self.start_row() for _ in wanted]
        for row, (_, shared) in zip(rows, wanted, strict=True):
            if shared:
                self.share(row, shared)
        for row, (n_tokens, _) in zip(rows, wanted, strict=True):
            self.grow(row, n_tokens)
        return rows

    def release(self, row: int) -> int:
        """Free the row and its blocks, for reuse at once (Algorithm 1, line 14).

        Returns how many blocks no row holds any more. Cached blocks stay until evicted, a request's last
        blocks first.
        """
        if row in self.beams:
            return self.beams.release(row)
        assert 0 <= row < self.n_rows and self.slots_of[row], f"row {row} is not reserved"
        n_released = self.free(self.blocks_of(row))
        self.end_row(row)
        return n_released
