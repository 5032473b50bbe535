"""The prefix cache: finds full blocks of keys and values by the tokens they were computed from.

As in vLLM's automatic prefix caching and SGLang, requests that begin with the same tokens share the blocks of
these tokens. Keys and values depend on all tokens before them, so the hash of a block covers the block and
everything before it: the hash of the previous block, down to a root that stands for the tenant and the model.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from struct import pack
from typing import Protocol

from orca_jax.scheduling.host_tier import HostTier
from orca_jax.scheduling.snapshots import Snapshots

_Hash = bytes


def root_hash(*parts: str) -> _Hash:
    """The hash that a chain starts from. Chains from different parts, such as salts, never meet."""
    digest = hashlib.sha256(b"orca_jax prefix")
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def next_hash(previous: _Hash, token_ids: Sequence[int]) -> _Hash:
    """The hash of a full block, from the hash of the block before it."""
    return hashlib.sha256(previous + pack(f"{len(token_ids)}i", *token_ids)).digest()


def chain_hashes(root: _Hash, token_ids: Sequence[int], block_size: int) -> list[_Hash]:
    """The hashes of all full blocks of these tokens."""
    hashes: list[_Hash] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        root = next_hash(root, token_ids[start : start + block_size])
        hashes.append(root)
    return hashes


class BlockListener(Protocol):
    """Receives changes of the prefix cache, on the scheduler's thread, which must not wait.

    It sees only blocks that every client may share: tokens that belong to an API key or a `cache_salt` are
    never announced.
    """

    def stored(self, block_hash: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """A block can be found; `parent` is the hash of the block before it, None for a first block."""
        ...

    def removed(self, block_hash: bytes) -> None:
        """A block that was stored can no longer be found."""
        ...

    def cleared(self) -> None:
        """No block can be found any more."""
        ...


class PrefixCache:
    """The blocks that have a hash. Those that no request holds can be evicted, least recently used first.

    `n_queries` and `n_hits` count prompt tokens that were looked up and found, `n_evictions` the evicted
    blocks. All methods are O(1) per block. `listener` receives changes; see `tell`. With recurrent layers a
    prefix ends where their `snapshots` has a state. Evicted blocks go to the `host` tier, if there is one.
    """

    def __init__(self, snapshots: Snapshots | None = None, host: HostTier | None = None) -> None:
        self.snapshots = snapshots
        self.host = host
        self.n_queries = 0
        self.n_hits = 0
        self.n_evictions = 0
        self.listener: BlockListener | None = None
        self._announced: set[_Hash] = set()  # hashes that the listener knows
        self._block_of: dict[_Hash, int] = {}
        self._hash_of: dict[int, _Hash] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._block_of)

    @property
    def n_idle(self) -> int:
        """Blocks that no request holds."""
        return len(self._idle)

    def blocks(self) -> list[tuple[_Hash, int]]:
        """All blocks that can be found, with their hashes."""
        return [*self._block_of.items()]

    def __contains__(self, block_hash: _Hash) -> bool:
        return block_hash in self._block_of

    def find(self, hashes: Sequence[_Hash], limit: int) -> list[int]:
        """The blocks of the longest cached prefix of `hashes`, at most `limit` blocks.

        With recurrent layers a request may begin with fewer (`prefix_lookup.cached_blocks`).
        """
        blocks: list[int] = []
        for i in range(min(limit, len(hashes))):
            block = self._block_of.get(hashes[i])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add(self, block: int, block_hash: _Hash) -> bool:
        """Make a held block findable; False if another block has the same hash already."""
        if block_hash in self._block_of:
            return False
        assert block not in self._hash_of, f"block {block} has a hash already"
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def tell(self, listener: BlockListener) -> None:
        """Send every change from now on to `listener`. Blocks that are cached already are never announced."""
        self._announced.clear()
        self.listener = listener
        listener.cleared()

    def announce(self, block_hash: _Hash, parent: _Hash | None, token_ids: Sequence[int]) -> None:
        """Announce a block that was just added and that every client may share."""
        assert self.listener is not None
        self._announced.add(block_hash)
        self.listener.stored(block_hash, parent, token_ids)

    def hold(self, block: int) -> None:
        """Mark an idle block as held by a request."""
        del self._idle[block]

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Mark blocks as held by no request; returns those without a hash, which are free.

        The others stay in the cache, the last one as the most recently used.
        """
        without: list[int] = []
        for block in blocks:
            if block in self._hash_of:
                self._idle[block] = None
            else:
                without.append(block)
        return without

    def evict(self) -> int:
        """Drop the least recently used idle block, and return it for another use."""
        block, _ = self._idle.popitem(last=False)
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self.n_evictions += 1
        if self.host is not None:
            self.host.store(block_hash, block)
        if self.snapshots is not None:
            self.snapshots.drop(block_hash)
        if self.listener is not None and block_hash in self._announced:
            self._announced.remove(block_hash)
            self.listener.removed(block_hash)
        return block

    def clear(self) -> list[int]:
        """Forget all hashes, because the contents are lost; returns the idle blocks, which are free now."""
        idle = list(self._idle)
        self._idle.clear()
        self._block_of.clear()
        self._hash_of.clear()
        if self.snapshots is not None:
            self.snapshots.clear()
        if self.host is not None:
            self.host.clear()
        if self.listener is not None:
            self._announced.clear()
            self.listener.cleared()
        return idle
