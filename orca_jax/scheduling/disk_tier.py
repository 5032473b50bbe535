"""The disk tier: blocks of the host tier in files, which survive a restart.

A block is written once it is in the host's memory, and read back to there, so that all other copies are
those of the host tier. Snapshots of recurrent layers' states have files too, under other names. Files are
read and written on a separate thread; the host's memory is read and written on the scheduler's thread, and
only where no issued iteration still has a copy to make.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from orca_jax.request.request import Request
from orca_jax.scheduling.host_tier import HostTier
from orca_jax.scheduling.snapshots import Snapshots

_INVERTED = bytes(255 - i for i in range(256))


def state_name(block_hash: bytes) -> bytes:
    """The name, among those of blocks, of the state after the block with this hash."""
    return block_hash.translate(_INVERTED)


class Files(Protocol):
    """Blocks by their hash on a disk. `wake` is called, on another thread, when one was read.

    Counts of blocks: written, read, damaged or missing, and removed for others; and those that there are.
    """

    wake: Callable[[], object]
    n_written: int
    n_read: int
    n_bad: int
    n_removed: int

    @property
    def n_blocks(self) -> int: ...

    @property
    def n_bytes(self) -> int: ...

    def __contains__(self, block_hash: bytes) -> bool: ...

    def write(self, block_hash: bytes, data: Sequence[bytes]) -> bool:
        """Let a block be written; False if too many wait."""
        ...

    def read(self, hashes: Sequence[bytes]) -> None:
        """Let blocks be read."""
        ...

    def take_loaded(self) -> list[tuple[bytes, bytes | None]]:
        """The blocks that were read since the last call, None for one that is missing or damaged."""
        ...


class HostMemory(Protocol):
    """The bytes of blocks in the host's memory, all stages together."""

    @property
    def n_done(self) -> int:
        """Iterations, in the order of issue, whose copies are all made."""
        ...

    def get(self, place: int) -> list[bytes]:
        """A copy of a block's bytes."""
        ...

    def put(self, place: int, data: bytes) -> None:
        """Write a block's bytes. Raises ValueError if there are too few or too many."""
        ...


class _Kept(NamedTuple):
    """One tier in the host's memory: of blocks, or with `snapshots` of states."""

    host: HostTier
    memory: HostMemory
    snapshots: Snapshots | None

    def name(self, block_hash: bytes) -> bytes:
        return block_hash if self.snapshots is None else state_name(block_hash)


class DiskTier:
    """Blocks of `host` in `files`, and with `states` the snapshots of recurrent layers.

    For the scheduler's thread.

    Blocks of other weights than those that the engine began with have no name that holds after a restart, so
    they are not written; see `stop`.
    """

    def __init__(
        self,
        host: HostTier,
        files: Files,
        memory: HostMemory,
        states: tuple[Snapshots, HostMemory] | None = None,
    ) -> None:
        self.host, self.files = host, files
        self._blocks = _Kept(host, memory, None)
        self._states: _Kept | None = None
        if states is not None:
            assert states[0].host is not None
            self._states = _Kept(states[0].host, states[1], states[0])
        kinds = [kept for kept in (self._blocks, self._states) if kept is not None]
        n_places = sum(kept.host.n for kept in kinds)
        self._unwritten: deque[tuple[_Kept, bytes, int]] = deque(maxlen=n_places)
        self._loaded: deque[tuple[bytes, bytes | None]] = deque()
        self._pending: dict[bytes, tuple[_Kept, bytes]] = {}  # what is being read, by its file's name
        self.stopped = False
        for kept in kinds:
            kept.host.on_store = partial(self._stored, kept)

    def _stored(self, kept: _Kept, block_hash: bytes, place: int) -> None:
        if not self.stopped:
            self._unwritten.append((kept, block_hash, place))

    def stop(self) -> None:
        """Write and read nothing from now on: the engine has other weights."""
        self.stopped = True
        self._unwritten.clear()

    def step(self) -> None:
        """Take what was read, and give what can be written. Before each iteration is chosen."""
        self._loaded += self.files.take_loaded()
        while self._loaded:
            name, data = self._loaded[0]
            kept, block_hash = self._pending[name]
            if data is not None and block_hash not in kept.host and not self.stopped:
                place = kept.host.take_place(kept.memory.n_done)
                if place is None:
                    break
                _put(kept, block_hash, place, data)
            del self._pending[name]
            self._loaded.popleft()
        while self._unwritten:
            kept, block_hash, place = self._unwritten[0]
            name = kept.name(block_hash)
            if kept.host.place_of(block_hash) == place and name not in self.files:
                if kept.host.last_use(place) >= kept.memory.n_done:
                    break
                if not self.files.write(name, kept.memory.get(place)):
                    break
            self._unwritten.popleft()

    def awaits(self, req: Request, hashes: Sequence[bytes], first: int, limit: int, *, n_here: int) -> bool:
        """Whether blocks are being read that a waiting request may begin with, after the `first` ones.

        The first `n_here` are on the devices or in the host's memory. They are asked for once for each
        request. What is damaged, has no place or is quicker to compute, is computed.
        """
        asked = req.asked_blocks
        if asked is None:
            wanted = self._wanted(hashes, first, limit, n_here)
            asked = req.asked_blocks = [kept.name(block_hash) for kept, block_hash in wanted]
            new = [name for name in asked if name not in self._pending]
            self._pending.update(zip(asked, wanted, strict=True))
            if new:
                self.files.read(new)
        return any(name in self._pending for name in asked)

    def _wanted(
        self, hashes: Sequence[bytes], first: int, limit: int, n_here: int
    ) -> list[tuple[_Kept, bytes]]:
        """List what to read so that a request begins with more than the `first` blocks."""
        if self.stopped:
            return []
        end, host = n_here, self.host
        most = min(limit, len(hashes), n_here + host.n // 2)
        while end < most and (hashes[end] in self.files or hashes[end] in host):
            end += 1
        state: tuple[_Kept, bytes] | None = None
        if self._states is not None:  # up to the last block after which there is a state anywhere
            end = next((n for n in range(end, first, -1) if self._has_state(hashes[n - 1])), first)
            if end > first and not self._state_is_here(hashes[end - 1]):
                state = self._states, hashes[end - 1]
        wanted = [(self._blocks, each) for each in hashes[min(n_here, end) : end] if each not in host]
        costs, n_read = host.costs, max(0, end - n_here)
        if costs is not None:
            seconds = len(wanted) * costs.disk + (n_read - len(wanted)) * costs.host
            if self._states is not None:
                seconds += costs.state * (costs.host if state is None else costs.disk)
            if not costs.pays(seconds, first, end - first):
                return []
        return wanted if state is None else [*wanted, state]

    def _state_is_here(self, block_hash: bytes) -> bool:
        """Whether the state after a block is on the devices or in the host's memory."""
        assert self._states is not None and self._states.snapshots is not None
        return block_hash in self._states.snapshots or block_hash in self._states.host

    def _has_state(self, block_hash: bytes) -> bool:
        return self._state_is_here(block_hash) or state_name(block_hash) in self.files


def _put(kept: _Kept, block_hash: bytes, place: int, data: bytes) -> None:
    try:
        kept.memory.put(place, data)
    except ValueError:  # of another version of this program
        kept.host.give_back(place)
    else:
        kept.host.insert(block_hash, place)
