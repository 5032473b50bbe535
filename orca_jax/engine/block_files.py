"""The files of the disk tier: blocks of keys and values by their hash, each written whole or not at all.

A file is written under another name and renamed. Its header has the hash, the length and a checksum of the
contents, so that a file which was cut, damaged or renamed counts as not there. Names begin with a fingerprint
of all that the bytes depend on besides the tokens: the model, its weights, dtypes and sizes.
"""

import fcntl
import logging
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from orca_jax.errors import ConfigError

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<8s32sQI")  # magic, hash, length, CRC-32
_MAGIC = b"orca-kv1"
_TEMPORARY = ".new"
_QUEUE_BYTES = 64 << 20  # of blocks to write, and of blocks that were read
_LOOK_SECONDS = 1.0


class BlockFiles:
    """Blocks in `directory`, up to `most_bytes`; those used longest ago are removed first.

    One thread reads and writes; it calls `wake` when a block was read. Files of other fingerprints count as
    well, and are removed like others. Raises ConfigError if the directory cannot be used, or another engine
    uses it.
    """

    def __init__(
        self, directory: Path, fingerprint: str, most_bytes: int, wake: Callable[[], object] = lambda: None
    ) -> None:
        self._directory, self._prefix, self._most_bytes = directory, f"{fingerprint}-", most_bytes
        self.wake = wake
        self.n_written = self.n_read = self.n_bad = self.n_removed = 0
        self._changed = threading.Condition()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by name, least recently used first
        self._writes: deque[tuple[bytes, Sequence[bytes]]] = deque()
        self._writing_bytes = 0
        self._reads: deque[bytes] = deque()
        self._loaded: deque[tuple[bytes, bytes | None]] = deque()
        self._loaded_bytes = 0
        self._closing = False
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise ConfigError(f"kv_disk is {str(directory)!r}, which cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"kv_disk is {str(directory)!r}, which another engine uses; give each a directory of its own"
            ) from error
        self._scan()
        self._bytes = sum(self._sizes.values())
        self._remove_oldest()
        self._thread = threading.Thread(target=self._run, name="orca-kv-disk", daemon=True)
        self._thread.start()

    def __contains__(self, block_hash: bytes) -> bool:
        return self._name(block_hash) in self._sizes

    @property
    def n_blocks(self) -> int:
        """Blocks in the directory, those of other fingerprints too."""
        return len(self._sizes)

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return self._bytes

    def write(self, block_hash: bytes, data: Sequence[bytes], wait: float = 0.0) -> bool:
        """Let a block be written, if it is not there; False if too many wait for more than `wait` seconds."""
        if block_hash in self:
            return True
        size = sum(map(len, data))
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(size), max(0.0, wait)):
                return False
            self._writes.append((block_hash, data))
            self._writing_bytes += size
            self._changed.notify_all()
        return True

    def read(self, hashes: Sequence[bytes]) -> None:
        """Let blocks be read; `take_loaded` has them later."""
        with self._changed:
            self._reads.extend(hashes)
            self._changed.notify_all()

    def take_loaded(self) -> list[tuple[bytes, bytes | None]]:
        """The blocks that were read since the last call, None for one that is missing or damaged."""
        if not self._loaded:
            return []
        with self._changed:
            loaded = [*self._loaded]
            self._loaded.clear()
            self._loaded_bytes = 0
            self._changed.notify_all()
        return loaded

    def close(self, seconds: float = 30.0) -> None:
        """Write what waits, for up to so many seconds, and end the thread. A second call does nothing."""
        with self._changed:
            self._closing = True
            self._reads.clear()
            self._changed.notify_all()
        self._thread.join(seconds)
        if self._lock >= 0 and not self._thread.is_alive():
            os.close(self._lock)
            self._lock = -1

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._writes or self._closing or self._may_read()):
                    self._changed.wait(_LOOK_SECONDS)
                if self._may_read():
                    block_hash, data = self._reads.popleft(), None
                elif self._writes:
                    block_hash, data = self._writes.popleft()
                    self._writing_bytes -= sum(map(len, data))
                    self._changed.notify_all()
                else:
                    return
            if data is None:
                self._load(block_hash)
            else:
                self._store(block_hash, data)

    def _has_room(self, size: int) -> bool:
        return not self._closing and (not self._writes or self._writing_bytes + size <= _QUEUE_BYTES)

    def _may_read(self) -> bool:
        return bool(self._reads) and self._loaded_bytes < _QUEUE_BYTES

    def _load(self, block_hash: bytes) -> None:
        name = self._name(block_hash)
        try:
            data = _contents(self._path(name), block_hash)
        except OSError:
            data = None
        with self._changed:
            if data is None:
                self.n_bad += 1
                self._forget(name)
            else:
                self.n_read += 1
                if name in self._sizes:
                    self._sizes.move_to_end(name)
            self._loaded.append((block_hash, data))
            self._loaded_bytes += 0 if data is None else len(data)
        if data is not None:
            _touch(self._path(name))
        self.wake()

    def _store(self, block_hash: bytes, data: Sequence[bytes]) -> None:
        name = self._name(block_hash)
        if name in self._sizes:
            return
        size = _HEADER.size + sum(map(len, data))
        if size > self._most_bytes:
            return
        path = self._path(name)
        new = path.with_name(path.name + _TEMPORARY)
        checksum = 0
        for part in data:
            checksum = zlib.crc32(part, checksum)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
                file.write(_HEADER.pack(_MAGIC, block_hash, size - _HEADER.size, checksum))
                for part in data:
                    file.write(part)
            _touch(new)
            new.rename(path)
        except OSError as error:
            _log.warning("the disk tier could not write a block, which is therefore not kept: %s", error)
            new.unlink(missing_ok=True)
            return
        with self._changed:
            self._sizes[name] = size
            self._bytes += size
            self.n_written += 1
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        while self._bytes > self._most_bytes:
            self._forget(next(iter(self._sizes)))
            self.n_removed += 1

    def _forget(self, name: str) -> None:
        self._bytes -= self._sizes.pop(name, 0)
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("the disk tier could not remove a block: %s", error)

    def _name(self, block_hash: bytes) -> str:
        return self._prefix + block_hash.hex()

    def _path(self, name: str) -> Path:
        return self._directory / name[-2:] / name

    def _scan(self) -> None:
        """Find the files of earlier engines, and remove what was not written whole."""
        found: list[tuple[int, str, int]] = []
        for folder in self._directory.iterdir():
            if len(folder.name) != 2 or not folder.is_dir():
                continue
            for entry in os.scandir(folder):
                if entry.name.endswith(_TEMPORARY):
                    Path(entry.path).unlink(missing_ok=True)
                elif entry.name.endswith(folder.name):
                    stat = entry.stat()
                    found.append((stat.st_mtime_ns, entry.name, stat.st_size))
        self._sizes.update((name, size) for _, name, size in sorted(found))


def _contents(path: Path, block_hash: bytes) -> bytes | None:
    """The contents of a block's file; None if it is damaged."""
    data = path.read_bytes()
    if len(data) < _HEADER.size:
        return None
    magic, found, length, checksum = _HEADER.unpack_from(data)
    contents = data[_HEADER.size :]
    right = magic == _MAGIC and found == block_hash and len(contents) == length
    return contents if right and zlib.crc32(contents) == checksum else None


def _touch(path: Path) -> None:
    """Note the time of use, for the order of removal after a restart."""
    try:
        now = time.time_ns()  # the kernel's time of a write is coarser
        os.utime(path, ns=(now, now))
    except OSError:
        pass
