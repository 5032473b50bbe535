"""Snapshots of recurrent layers' states, so that the prefix cache finds the beginnings of hybrids' prompts.

A cached block has the keys and values of its tokens. What a recurrent layer carries on from them is a state
of fixed size, which the next token overwrites. A snapshot is a copy of a request's state at the border of two
blocks, found by the hash of the block before it. A request that begins with cached blocks needs the snapshot
after the last of them, so a hit ends at the last border that has one.
"""

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple

from orca_jax.scheduling.host_tier import HostTier

# Blocks between two snapshots of one request, at the least: fewer tokens are computed again quicker than they
# are worth a state's memory.
_LEAST_BLOCKS = 4


def least_blocks(every: int) -> int:
    """The fewest blocks between two snapshots of a request, of which one is kept `every` so many blocks."""
    return min(every, _LEAST_BLOCKS)


class StateCopies(NamedTuple):
    """The states (from, to) to copy before an iteration, and after it.

    State r is that of row r of the block table; snapshots come after the rows, and states after drafts last.
    `kept` are the states that drafted rows keep, as in DraftStates.
    """

    before: list[tuple[int, int]]
    after: list[tuple[int, int]]
    kept: Sequence[tuple[int, int]] = ()


NO_STATE_COPIES = StateCopies([], [])


class Snapshots:
    """`n` snapshots, as states after those of `n_rows` rows.

    Iterations run in the order of issue. So a snapshot can be found as soon as the iteration that makes it is
    issued, and can be made anew in the iteration that reads it. A request keeps snapshots at multiples of
    `every` blocks, at the end of its prompt, and where other requests' prompts went on differently; any other
    one gives its place to the request's next, unless another request has found it meanwhile. If no place is
    free, the snapshot that was used longest ago goes. `n_made`, `n_used` and `n_evicted` count.

    Snapshots that others replace go to the `host` tier, if there is one, and so do those whose blocks are
    evicted. From there a state is read into a snapshot's place, where other requests find it too, or into the
    request's row if no place is free.
    """

    def __init__(
        self, n: int, *, n_rows: int, block_size: int, every: int, host: HostTier | None = None
    ) -> None:
        self.n = n
        self.host = host
        self.n_made = self.n_used = self.n_evicted = 0
        self.copies = StateCopies([], [])  # of the next issued iteration
        self._size = block_size
        self._every = every * block_size
        self._least = least_blocks(every) * block_size
        self._free = list(range(n_rows + n - 1, n_rows - 1, -1))  # a stack
        self._named: OrderedDict[bytes, int] = OrderedDict()  # by hash, least recently used first
        self._name_of: dict[int, bytes] = {}
        # Of each row: snapshots, by number of blocks, whose last block's tokens the host does not know yet;
        # the snapshot that the next one replaces; the tokens at the newest snapshot.
        self._unnamed: list[dict[int, int]] = [{} for _ in range(n_rows)]
        self._replaceable: dict[int, int] = {}
        self._row_of: dict[int, int] = {}  # the inverse
        self._newest = [0] * n_rows
        self._older = [0] * n_rows  # the newest before that
        self._held: set[int] = set()  # snapshots that new rows of the next issued iteration begin with

    def __len__(self) -> int:
        """Snapshots that can be found or will be."""
        return self.n - len(self._free)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._named

    def longest(self, hashes: Sequence[bytes], n_blocks: int) -> int:
        """The most of the first `n_blocks` blocks after which there is a snapshot; 0 for none."""
        named = self._named
        return next((n for n in range(n_blocks, 0, -1) if hashes[n - 1] in named), 0)

    def longest_in_tiers(self, hashes: Sequence[bytes], n_blocks: int, first: int = 0) -> int:
        """Like `longest`, with the host tier's, and of more than the `first` blocks."""
        host: Container[bytes] = () if self.host is None else self.host
        named = self._named
        borders = range(n_blocks, first, -1)
        return next((n for n in borders if hashes[n - 1] in named or hashes[n - 1] in host), 0)

    def place_of(self, block_hash: bytes) -> int | None:
        """The state that is the snapshot with this hash; None for none on the devices."""
        return self._named.get(block_hash)

    def all_named(self) -> list[tuple[bytes, int]]:
        """The snapshots that can be found on the devices: hash and state."""
        return [*self._named.items()]

    def next_border(self, n_computed: int, n_tokens: int, n_cached: int, row: int) -> int | None:
        """The number of tokens at which a prompt's next piece must end for a snapshot; None: anywhere.

        Of its `n_tokens` known tokens, `n_computed` are computed, and `n_cached` are in cached blocks: where
        they end, prompts differ, and the same beginning may come again. `row` is -1 for a waiting request.
        """
        least = (n_computed if row < 0 else self._newest[row]) + self._least
        marks = (n_computed // self._every + 1) * self._every, self._last_border(n_tokens), n_cached
        wanted = [mark for mark in marks if n_computed < mark < n_tokens and mark >= least]
        return min(wanted, default=None)

    def begin(self) -> None:
        """Forget the copies of the iteration before."""
        self.copies = StateCopies([], [])
        self._held.clear()

    def hold(self, block_hash: bytes) -> int | None:
        """The snapshot with this hash, for `use`; None if it has to be read from the host tier.

        Call it before any block is allocated, which may evict the snapshot or others. It can still be used
        then: the iteration copies it before it makes another one at its place.
        """
        snapshot = self._named.get(block_hash)
        if snapshot is None:
            assert self.host is not None, "a prompt begins where there is a snapshot"
            self.host.hold((block_hash,))
            return None
        self._named.move_to_end(block_hash)
        self._keep(snapshot)
        self._held.add(snapshot)
        return snapshot

    def use(self, snapshot: int | None, block_hash: bytes, row: int, n_tokens: int) -> None:
        """Let a new row go on after its first `n_tokens` tokens, from what `hold` returned for this hash."""
        if snapshot is None:
            snapshot = self._read_in(block_hash, row)
        if snapshot is not None:
            self.copies.before.append((snapshot, row))
        self._newest[row] = n_tokens
        self.n_used += 1

    def _read_in(self, block_hash: bytes, row: int) -> int | None:
        """Let a state be read in from the host: as a snapshot, or into the row if no place is free.

        A place is not free where a row of the next iteration begins: the host's states are copied first.
        """
        found = self._named.get(block_hash)
        if found is not None:  # another new row has the same beginning
            return found
        assert self.host is not None
        place = self._free[-1] if self._free else next(iter(self._named.values()), None)
        if place is None or place in self._held:
            self.host.read((block_hash,), (row,))
            return None
        taken = self._take()
        assert taken == place
        self.host.read((block_hash,), (place,))
        self._held.add(place)
        self._named[block_hash] = place
        self._name_of[place] = block_hash
        return place

    def make(
        self,
        row: int,
        n_tokens: int,
        *,
        prompt: int,
        known: bytes | None,
        shared: bool,
        state: int | None = None,
    ) -> None:
        """Make a snapshot of a row that will have computed `n_tokens`, if that is a border far enough on.

        `prompt` counts the prompt's tokens, `known` is the hash of the block before the border if its tokens
        are known, and `shared` says whether others computed that block before. It is copied from
        `state`; None: from the row's own.
        """
        if n_tokens % self._size or n_tokens - self._newest[row] < self._least:
            return
        self._older[row], self._newest[row] = self._newest[row], n_tokens
        if known is not None and known in self._named:
            self._named.move_to_end(known)
            return
        before = self._replaceable.get(row)
        if before is not None:
            self._forget(before)
        snapshot = self._take()
        if snapshot is None:
            return
        self.n_made += 1
        self.copies.after.append((row if state is None else state, snapshot))
        self._unnamed[row][n_tokens // self._size] = snapshot
        if n_tokens % self._every and n_tokens != self._last_border(prompt) and not shared:
            self._replaceable[row] = snapshot
            self._row_of[snapshot] = row

    def unmake(self, row: int, n_computed: int) -> None:
        """Forget the row's snapshot after more than `n_computed` tokens: it has a rejected draft in it.

        It is of the row's newest iteration, which makes no more than one.
        """
        if self._newest[row] <= n_computed:
            return
        snapshot = self._unnamed[row].pop(self._newest[row] // self._size, None)
        self._newest[row] = self._older[row]
        if snapshot is not None:
            self.n_made -= 1
            self._keep(snapshot)
            self._free.append(snapshot)

    def name(self, row: int, n_blocks: int, block_hash: bytes) -> None:
        """Let others find the row's snapshot after `n_blocks` blocks, if there is one, by this hash."""
        snapshot = self._unnamed[row].pop(n_blocks, None)
        if snapshot is None:
            return
        if block_hash in self._named:  # another request was quicker
            self._keep(snapshot)
            self._free.append(snapshot)
            return
        self._named[block_hash] = snapshot
        self._name_of[snapshot] = block_hash

    def drop(self, block_hash: bytes) -> None:
        """Forget the snapshot with this hash, if there is one: its block is gone."""
        snapshot = self._named.get(block_hash)
        if snapshot is not None:
            self._leave(block_hash, snapshot)

    def release(self, row: int) -> None:
        """End a row: its snapshots stay, except those whose tokens were never known."""
        self._free += self._unnamed[row].values()
        for snapshot in self._unnamed[row].values():
            self._keep(snapshot)
        self._unnamed[row].clear()
        if row in self._replaceable:
            self._keep(self._replaceable[row])
        self._newest[row] = 0

    def clear(self) -> None:
        """Forget all snapshots, because the contents are lost."""
        self._free += self._named.values()
        self._named.clear()
        self._name_of.clear()
        self._replaceable.clear()
        self._row_of.clear()
        for row, unnamed in enumerate(self._unnamed):
            self._free += unnamed.values()
            unnamed.clear()
            self._newest[row] = 0
        if self.host is not None:
            self.host.clear()
        self.begin()

    def _last_border(self, n_tokens: int) -> int:
        """The last border before the last of `n_tokens`, which every request computes for its next token."""
        return (n_tokens - 1) // self._size * self._size

    def _take(self) -> int | None:
        """A snapshot's place for another use: a free one, or the one used longest ago; None if none is."""
        if not self._free and self._named:
            self._leave(*next(iter(self._named.items())))
            self.n_evicted += 1
        return self._free.pop() if self._free else None

    def _leave(self, block_hash: bytes, snapshot: int) -> None:
        """Free a snapshot that can be found, which goes to the host tier."""
        if self.host is not None:
            self.host.store(block_hash, snapshot)
        self._forget(snapshot)

    def _forget(self, snapshot: int) -> None:
        """Free a snapshot, with its hash if it has one."""
        row = self._row_of.get(snapshot)
        self._keep(snapshot)
        name = self._name_of.pop(snapshot, None)
        if name is not None:
            del self._named[name]
        else:
            assert row is not None
            unnamed = self._unnamed[row]
            del unnamed[next(n for n, each in unnamed.items() if each == snapshot)]
        self._free.append(snapshot)

    def _keep(self, snapshot: int) -> None:
        """Let no later snapshot of its row replace this one."""
        row = self._row_of.pop(snapshot, None)
        if row is not None:
            del self._replaceable[row]
