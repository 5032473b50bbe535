"""The host tier: blocks that the device's prefix cache evicts, kept in host memory and found by their hash.

The K/V manager only knows which hash is at which place of the host's memory. The bytes are with the workers,
each of which copies its stage's part of a block when a control message lists it. Iterations run in the order
of issue, so a block can be found as soon as the iteration that copies it out is issued, and a request that
begins with it can run in the iteration that copies it in.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from orca_jax.scheduling.tier_costs import TierCosts


class HostCopies(NamedTuple):
    """Blocks to copy before an iteration: first out (block, place), then in (place, block)."""

    out: list[tuple[int, int]]
    into: list[tuple[int, int]]


NO_HOST_COPIES = HostCopies([], [])


class HostTier:
    """`n` places for blocks in the host's memory. All methods are O(1) per block.

    A block that is read in stays here too, so that its next eviction copies nothing. If no place is free, the
    block that was used longest ago goes. Blocks that the next iteration reads in are held until it is issued.
    `n_stored`, `n_read` and `n_evicted` count blocks. `n_issued` counts iterations, `generation` the losses
    of all contents. `on_store` is called with each block's hash and place. With `costs`, which are set before
    the first request, blocks are found only where reading them is quicker than computing them.
    """

    costs: TierCosts | None = None

    def __init__(self, n: int) -> None:
        self.n = n
        self.n_stored = self.n_read = self.n_evicted = self.n_issued = 0
        self.generation = 0
        self.on_store: Callable[[bytes, int], object] | None = None
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # by hash, least recently used first
        self._free = list(range(n - 1, -1, -1))  # a stack
        self._held: set[bytes] = set()
        self._last_use: dict[int, int] = {}  # by place: the iteration that copies last to it or from it
        # Of the next issued iteration. The last block that goes to a place replaces an earlier one there.
        self._out: dict[int, int] = {}  # by place
        self._into: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._place_of)

    @property
    def n_free(self) -> int:
        """Places that have no block, and that nobody has taken."""
        return len(self._free)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._place_of

    @property
    def copies(self) -> HostCopies:
        """The copies of the next issued iteration."""
        if not self._out and not self._into:
            return NO_HOST_COPIES
        return HostCopies([(block, place) for place, block in self._out.items()], self._into)

    def begin(self) -> None:
        """Forget the copies of the iteration before."""
        if self._out or self._into:
            self._held.clear()
            self._out = {}
            self._into = []

    def find(self, hashes: Sequence[bytes], first: int, limit: int) -> int:
        """The number of blocks to read in, one after another, from `hashes[first]` on and before `limit`."""
        n, costs = self.n_found(hashes, first, limit), self.costs
        return n if costs is None or costs.pays(n * costs.host, first, n) else 0

    def n_found(self, hashes: Sequence[bytes], first: int, limit: int) -> int:
        """The number of blocks that are here, as in `find`, whatever reading them costs."""
        end = first
        while end < min(limit, len(hashes)) and hashes[end] in self._place_of:
            end += 1
        return end - first

    def hold(self, hashes: Sequence[bytes]) -> None:
        """Keep these blocks of a prompt until the next iteration is issued, which reads them in.

        The last one becomes the least recently used of them: without the blocks before it, it is of no use.
        """
        self._held.update(hashes)
        for block_hash in reversed(hashes):
            self._place_of.move_to_end(block_hash)

    def read(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy held blocks to these blocks of the device before the next iteration."""
        for block_hash, block in zip(hashes, blocks, strict=True):
            assert block_hash in self._held, "hold blocks before others are allocated"
            place = self._place_of[block_hash]
            self._into.append((place, block))
            self._last_use[place] = self.n_issued
        self.n_read += len(hashes)

    def store(self, block_hash: bytes, block: int) -> None:
        """Copy a block out before the next iteration, which may write to it, unless it is here already."""
        if block_hash in self._place_of:
            self._place_of.move_to_end(block_hash)
            return
        place = self._take()
        if place is None:
            return
        self._place_of[block_hash] = place
        self._out[place] = block
        self._last_use[place] = self.n_issued
        self.n_stored += 1
        if self.on_store is not None:
            self.on_store(block_hash, place)

    def place_of(self, block_hash: bytes) -> int | None:
        """The block's place; None if it is not here."""
        return self._place_of.get(block_hash)

    def last_use(self, place: int) -> int:
        """The iteration that copies last to a place or from it, counted from 0; -1 for none."""
        return self._last_use.get(place, -1)

    def take_place(self, n_done: int) -> int | None:
        """A place for a block from elsewhere, to `insert` or `give_back`.

        None if there is none that the first `n_done` iterations alone have used.
        """
        self._held.clear()  # what was held for the iteration before, which is issued
        place = self._take()
        if place is not None and self.last_use(place) >= n_done:
            self._free.append(place)
            return None
        return place

    def give_back(self, place: int) -> None:
        """Free a place that was taken."""
        self._free.append(place)

    def insert(self, block_hash: bytes, place: int) -> None:
        """Let a block that somebody wrote to a taken place be found."""
        assert block_hash not in self._place_of
        self._place_of[block_hash] = place

    def clear(self) -> None:
        """Forget all blocks, because the contents are lost; what others write to taken places is lost too."""
        self.generation += 1
        self._free += self._place_of.values()
        self._place_of.clear()
        self._held.clear()
        self._out = {}
        self._into = []

    def _take(self) -> int | None:
        """A free place, or that of the block used longest ago; None for none, or if that block is held."""
        if not self._free:
            oldest = next(iter(self._place_of), None)
            if oldest is None or oldest in self._held:
                return None
            self._free.append(self._place_of.pop(oldest))
            self.n_evicted += 1
        return self._free.pop()
