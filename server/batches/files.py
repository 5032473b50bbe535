"""The files of clients in a folder: bounded in bytes and number, and seen only by their own API key.

Methods read and write the disk, so call them on the batches' own thread (service.py).
"""

import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from server.errors import StoreFull, UnknownFile

MAX_FILES = 4096  # of all API keys together
_MAX_NAME = 255
_META, _DATA, _GROWING = ".json", ".data", ".growing"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A whole file. `tenant` is the fingerprint of its API key, "" on a server without keys."""

    id: str
    tenant: str
    filename: str
    purpose: str
    n_bytes: int
    created_at: int


class GrowingFile:
    """A file that is being written; others see it once it is finished. For one thread."""

    def __init__(
        self, store: "FileStore", file_id: str, tenant: str, handle: IO[bytes], n_bytes: int
    ) -> None:
        self.id = file_id
        self.n_bytes = n_bytes
        self._store, self._tenant, self._handle = store, tenant, handle
        self._is_over = False  # finished or abandoned

    def write(self, data: bytes) -> None:
        """Append. Raises StoreFull, and then nothing was written."""
        self._store.take_bytes(self._tenant, len(data))
        self.n_bytes += len(data)
        self._handle.write(data)

    def flush(self) -> None:
        self._handle.flush()

    def finish(self, filename: str, purpose: str) -> StoredFile:
        """Close it, and let others see it. Raises OSError, and then it is abandoned."""
        stored = StoredFile(
            self.id, self._tenant, filename[:_MAX_NAME], purpose, self.n_bytes, int(time.time())
        )
        try:
            self._handle.close()
            self._store.finished(stored)
        except OSError:
            self.abandon()
            raise
        self._is_over = True
        return stored

    def abandon(self) -> None:
        """Close it and remove it; nothing if it is finished."""
        if self._is_over:
            return
        self._is_over = True
        self._handle.close()
        self._store.abandoned(self.id, self._tenant, self.n_bytes)

    def close(self) -> None:
        """Close it; it goes on with `FileStore.reopen`, also after a restart."""
        self._handle.close()


class FileStore:
    """All files in `folder`: up to `max_bytes`, of which one tenant may have `max_each`."""

    def __init__(self, folder: Path, *, max_bytes: int, max_each: int) -> None:
        """Read what is there. Raises OSError."""
        self.max_bytes, self.max_each = max_bytes, max_each
        self._folder = folder
        self._files: dict[str, StoredFile] = {}
        self._n_bytes: dict[str, int] = {}  # by tenant, with what is being written
        self._n_growing = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(folder.glob(f"*{_META}")):
            try:
                stored = StoredFile(**json.loads(path.read_text("utf-8")))
                size = self._path(stored.id, _DATA).stat().st_size
            except (ValueError, TypeError, OSError):  # of a server that died while it wrote this
                path.unlink()
                continue
            self._files[stored.id] = stored
            self._count(stored.tenant, size)
        for path in folder.glob(f"*{_DATA}"):
            if path.name.removesuffix(_DATA) not in self._files:
                path.unlink()

    @property
    def n_bytes(self) -> int:
        """Bytes of all files, with those that are being written."""
        return sum(self._n_bytes.values())

    def __len__(self) -> int:
        return len(self._files) + self._n_growing

    def of(self, tenant: str) -> list[StoredFile]:
        """A tenant's files, the newest first."""
        own = [stored for stored in self._files.values() if stored.tenant == tenant]
        return sorted(own, key=lambda stored: (stored.created_at, stored.id), reverse=True)

    def get(self, file_id: str, tenant: str) -> StoredFile:
        """Raises UnknownFile, also for a file of another tenant."""
        stored = self._files.get(file_id)
        if stored is None or stored.tenant != tenant:
            raise UnknownFile(f"there is no file {file_id[:100]!r}")
        return stored

    def open(self, stored: StoredFile) -> IO[bytes]:
        """For reading."""
        return self._path(stored.id, _DATA).open("rb")

    def delete(self, stored: StoredFile) -> None:
        """Remove a file. A reader that has it open may read on."""
        del self._files[stored.id]
        self._path(stored.id, _META).unlink(missing_ok=True)
        self._path(stored.id, _DATA).unlink(missing_ok=True)
        self._count(stored.tenant, -stored.n_bytes)

    def begin(self, tenant: str) -> GrowingFile:
        """A new file. Raises StoreFull if there are too many."""
        if len(self) >= MAX_FILES:
            raise StoreFull(f"the server keeps {MAX_FILES} files, the limit; delete some")
        file_id = f"file-{uuid.uuid4().hex}"
        handle = os.fdopen(os.open(self._path(file_id, _GROWING), _NEW, 0o600), "wb")
        self._n_growing += 1
        return GrowingFile(self, file_id, tenant, handle, 0)

    def reopen(self, file_id: str, tenant: str) -> tuple[GrowingFile, Iterator[bytes]]:
        """Go on with a file of lines, and what it has so far; a last line that was cut off is gone."""
        path = self._path(file_id, _GROWING)
        n_whole = 0
        with path.open("ab+") as file:
            file.seek(0)
            for line in file:
                n_whole += len(line) if line.endswith(b"\n") else 0
            file.truncate(n_whole)
        self._count(tenant, n_whole)
        self._n_growing += 1
        return GrowingFile(self, file_id, tenant, path.open("ab"), n_whole), _lines(path, n_whole)

    def forget_growing(self, known: set[str]) -> None:
        """Remove what was being written when the server ended, other than the `known` ones."""
        for path in self._folder.glob(f"*{_GROWING}"):
            if path.name.removesuffix(_GROWING) not in known:
                path.unlink()

    # For GrowingFile.

    def take_bytes(self, tenant: str, n: int) -> None:
        """Raises StoreFull."""
        for have, most, whose in (
            (self._n_bytes.get(tenant, 0), self.max_each, "your API key's files"),
            (self.n_bytes, self.max_bytes, "all files"),
        ):
            if have + n > most:
                message = f"{whose} have {have} bytes, and {most} are allowed (orca serve --batch-bytes)"
                raise StoreFull(f"{message}; delete some")
        self._count(tenant, n)

    def finished(self, stored: StoredFile) -> None:
        os.replace(self._path(stored.id, _GROWING), self._path(stored.id, _DATA))
        write_whole(self._path(stored.id, _META), asdict(stored))
        self._n_growing -= 1
        self._files[stored.id] = stored

    def abandoned(self, file_id: str, tenant: str, n_bytes: int) -> None:
        self._n_growing -= 1
        self._count(tenant, -n_bytes)
        for kind in (_GROWING, _DATA):  # the second where the disk failed after it was moved
            self._path(file_id, kind).unlink(missing_ok=True)

    def _count(self, tenant: str, n: int) -> None:
        left = self._n_bytes.get(tenant, 0) + n
        self._n_bytes[tenant] = left
        if not left:
            del self._n_bytes[tenant]

    def _path(self, file_id: str, kind: str) -> Path:
        return self._folder / f"{file_id}{kind}"


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_whole(path: Path, value: object) -> None:
    """Write JSON so that a reader sees all of it or what was there before."""
    new = path.with_name(f".{path.name}.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump(value, file)
    os.replace(new, path)


def _lines(path: Path, n_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while file.tell() < n_bytes:
            yield file.readline()
