"""The disk tier: blocks of the host tier in files, which survive a restart.

A block is written once it is in the host's memory, and read back to there, so that all other copies are
those of the host tier. Files are read and written on a separate thread; the host's memory is read and
written on the scheduler's thread, and only where no issued iteration still has a copy to make.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from orca_jax.request.request import Request
from orca_jax.scheduling.host_tier import HostTier


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


class DiskTier:
    """Blocks of `host` in `files`. For the scheduler's thread.

    Blocks of other weights than those that the engine began with have no name that holds after a restart, so
    they are not written; see `stop`.
    """

    def __init__(self, host: HostTier, files: Files, memory: HostMemory) -> None:
        self.host, self.files, self.memory = host, files, memory
        self._unwritten: deque[tuple[bytes, int]] = deque(maxlen=host.n)
        self._loaded: deque[tuple[bytes, bytes | None]] = deque()
        self._pending: set[bytes] = set()  # blocks that are being read
        self.stopped = False
        host.on_store = self._stored

    def _stored(self, block_hash: bytes, place: int) -> None:
        if not self.stopped:
            self._unwritten.append((block_hash, place))

    def stop(self) -> None:
        """Write and read nothing from now on: the engine has other weights."""
        self.stopped = True
        self._unwritten.clear()

    def step(self) -> None:
        """Take what was read, and give what can be written. Before each iteration is chosen."""
        self._loaded += self.files.take_loaded()
        while self._loaded:
            block_hash, data = self._loaded[0]
            if data is not None and block_hash not in self.host and not self.stopped:
                place = self.host.take_place(self.memory.n_done)
                if place is None:
                    break
                self._put(block_hash, place, data)
            self._pending.discard(block_hash)
            self._loaded.popleft()
        n_done = self.memory.n_done
        while self._unwritten:
            block_hash, place = self._unwritten[0]
            if self.host.place_of(block_hash) == place and block_hash not in self.files:
                if self.host.last_use(place) >= n_done:
                    break
                if not self.files.write(block_hash, self.memory.get(place)):
                    break
            self._unwritten.popleft()

    def awaits(self, req: Request, hashes: Sequence[bytes], first: int, limit: int) -> bool:
        """Whether blocks are being read that a waiting request may begin with, from `hashes[first]` on.

        They are asked for once for each request. What is damaged, has no place or is quicker to compute, is
        computed.
        """
        asked = req.asked_blocks
        if asked is None:
            end = first
            most = min(limit, len(hashes), first + self.host.n // 2)
            while end < most and not self.stopped and (hashes[end] in self.files or hashes[end] in self.host):
                end += 1
            asked = [each for each in hashes[first:end] if each not in self.host]
            n, costs = end - first, self.host.costs
            if costs is not None:
                seconds = len(asked) * costs.disk + (n - len(asked)) * costs.host
                asked = asked if costs.pays(seconds, first, n) else []
            req.asked_blocks = asked
            new = [each for each in asked if each not in self._pending]
            self._pending.update(new)
            if new:
                self.files.read(new)
        return any(block_hash in self._pending for block_hash in asked)

    def _put(self, block_hash: bytes, place: int, data: bytes) -> None:
        try:
            self.memory.put(place, data)
        except ValueError:  # of another version of this program
            self.host.give_back(place)
        else:
            self.host.insert(block_hash, place)
