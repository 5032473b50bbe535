"""The files of clients in a folder: bounded in bytes and number, and visible only to their own API key.

A file's row in the database is written before its content and deleted after it. So everything on the disk has
a row, and a file without a row is never deleted. Methods use the disk, so call them on the batches' thread
(service.py); only `get` reads memory alone.
"""

import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import IO, Any, NamedTuple

from orca_jax.errors import ConfigError
from server.batches.database import Database
from server.errors import StoreFull, UnknownFile

MAX_FILES = 4096  # of all API keys together
_LOGGER = logging.getLogger("orca")
_MAX_NAME = 255
_DATA, _GROWING = ".data", ".growing"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A complete file. `tenant` is the fingerprint of its API key, "" on a server without keys."""

    id: str
    tenant: str
    filename: str
    purpose: str
    n_bytes: int
    created_at: int


class GrowingFile:
    """A file that is being written; others see it once it is finished. For one thread.

    A file that is not `counted` uses none of its tenant's room while it grows, because the results that it is
    made from still count.
    """

    def __init__(self, store: "FileStore", file_id: str, tenant: str, file: int, *, counted: bool) -> None:
        self.id = file_id
        self.tenant = tenant
        self.n_bytes = 0
        self.counted = counted
        self._store = store
        self._file: int | None = file

    def write(self, data: bytes) -> None:
        """Append data. Raises StoreFull, and then nothing was written; after OSError, abandon the file."""
        assert self._file is not None
        if self.counted:
            self._store.take_bytes(self.tenant, len(data))
        self.n_bytes += len(data)
        write_all(self._file, data)

    def close(self, *, durable: bool = False) -> None:
        """Close the file; with `durable`, after its bytes are on the disk."""
        if self._file is None:
            return
        try:
            if durable:
                os.fsync(self._file)
        finally:
            file, self._file = self._file, None
            os.close(file)

    def finish(self, filename: str, purpose: str) -> StoredFile:
        """Make the file visible. Raises OSError or sqlite3.Error, and then the file is abandoned."""
        return self._store.finish([Finished(self, filename, purpose)])[0]

    def abandon(self) -> None:
        """Remove the file, unless it is already finished or abandoned."""
        self._store.abandon(self)


class Finished(NamedTuple):
    """A file with all of its content, and the name and purpose under which it becomes visible."""

    file: GrowingFile
    filename: str
    purpose: str


class FileStore:
    """Keeps files in `folder`: up to `max_bytes` in all, and up to `max_each` of one tenant.

    A tenant may have the same share of the number of files, `MAX_FILES`.
    """

    def __init__(self, folder: Path, database: Database, *, max_bytes: int, max_each: int) -> None:
        """Read the existing files, and remove what unfinished uploads and deletions left.

        Raises OSError and sqlite3.Error.
        """
        self.max_bytes, self.max_each = max_bytes, max_each
        self._folder, self._database = folder, database
        self._files: dict[str, StoredFile] = {}
        self._n_bytes: dict[str, int] = {}  # by tenant, with what is being written
        self._growing: dict[str, GrowingFile] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        unknown = {path.name for path in folder.iterdir()}
        columns = "id, tenant, filename, purpose, n_bytes, created_at"
        for state, *values in database.read(f"SELECT state, {columns} FROM files ORDER BY created_at, id"):
            stored = StoredFile(*values)
            unknown -= {f"{stored.id}{kind}" for kind in (_DATA, _GROWING)}
            if state != "whole":
                self._remove(stored.id)
                continue
            self._files[stored.id] = stored
            self.count_bytes(stored.tenant, stored.n_bytes)
            self._check(stored)
        if unknown:
            _LOGGER.warning(
                "%s has %d files that the store does not know, such as %s; they are left as they are",
                *(folder, len(unknown), min(unknown)),
            )

    @property
    def n_bytes(self) -> int:
        """Bytes of all files, including those that are being written."""
        return sum(self._n_bytes.values())

    def __len__(self) -> int:
        return len(self._files) + len(self._growing)

    def of(self, tenant: str) -> list[StoredFile]:
        """A tenant's files, the newest first."""
        found = [stored for stored in self._files.values() if stored.tenant == tenant]
        return sorted(found, key=lambda stored: (stored.created_at, stored.id), reverse=True)

    def get(self, file_id: str, tenant: str) -> StoredFile:
        """The tenant's file with this id. Raises UnknownFile."""
        stored = self._files.get(file_id)
        if stored is None or stored.tenant != tenant:
            raise UnknownFile(f"there is no file {file_id[:100]!r}")
        return stored

    def open(self, stored: StoredFile) -> IO[bytes]:
        """Open a file for reading. Raises UnknownFile if an operator has removed the content."""
        try:
            return self._path(stored.id, _DATA).open("rb")
        except FileNotFoundError as error:
            raise UnknownFile(f"the content of file {stored.id} is missing on the server's disk") from error

    def delete(self, stored: StoredFile) -> None:
        """Remove a file. A reader that has it open can continue to read."""
        with self._database.change() as change:
            change.execute("UPDATE files SET state = 'deleted' WHERE id = ?", (stored.id,))
        del self._files[stored.id]
        self.count_bytes(stored.tenant, -stored.n_bytes)
        self._remove_later(stored.id)

    def begin(self, tenant: str, *, counted: bool = True) -> GrowingFile:
        """A new file. Raises StoreFull if there are too many."""
        most = MAX_FILES * self.max_each // self.max_bytes
        have = sum(one.tenant == tenant for one in (*self._files.values(), *self._growing.values()))
        if have >= most:
            whose = "your API key has" if tenant else "there are"
            raise StoreFull(f"{whose} {have} files, and {most} are allowed; delete some")
        if len(self) >= MAX_FILES:
            raise StoreFull(f"the server keeps {MAX_FILES} files, the limit; try again later")
        file_id = f"file-{uuid.uuid4().hex}"
        row = (file_id, tenant, "growing", "", "", 0, int(time.time()))
        with self._database.change() as change:
            change.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        try:
            file = os.open(self._path(file_id, _GROWING), _NEW, 0o600)
        except OSError:
            self._remove_later(file_id)
            raise
        growing = self._growing[file_id] = GrowingFile(self, file_id, tenant, file, counted=counted)
        return growing

    def finish(
        self, files: Sequence[Finished], also: Callable[[Connection], object] = lambda _: None
    ) -> list[StoredFile]:
        """Make these files visible at once; `also` makes further changes in the same transaction.

        Raises OSError or sqlite3.Error, and then the files are abandoned and nothing else has changed.
        """
        now = int(time.time())
        stored = [
            StoredFile(file.id, file.tenant, name[:_MAX_NAME], purpose, file.n_bytes, now)
            for file, name, purpose in files
        ]
        try:
            for file, _, _ in files:
                file.close(durable=True)
                os.rename(self._path(file.id, _GROWING), self._path(file.id, _DATA))
            if files:
                sync_folder(self._folder)
            with self._database.change() as change:
                for one in stored:
                    change.execute("REPLACE INTO files VALUES (?, ?, 'whole', ?, ?, ?, ?)", astuple(one))
                also(change)
        except BaseException:
            for file, _, _ in files:
                self.abandon(file)
            raise
        for one, (file, _, _) in zip(stored, files, strict=True):
            del self._growing[one.id]
            self._files[one.id] = one
            if not file.counted:
                self.count_bytes(one.tenant, one.n_bytes)
        return stored

    def abandon(self, file: GrowingFile) -> None:
        """Remove a file that is being written; if the disk fails now, at the next start."""
        if self._growing.pop(file.id, None) is None:
            return
        if file.counted:
            self.count_bytes(file.tenant, -file.n_bytes)
        try:
            file.close()
        except OSError:
            _LOGGER.warning("an abandoned file could not be closed", exc_info=True)
        self._remove_later(file.id)

    def take_bytes(self, tenant: str, n: int) -> None:
        """Count bytes that are about to be written. Raises StoreFull if there is no room for them."""
        have, flag = self._n_bytes.get(tenant, 0), "(orca serve --batch-bytes)"
        if have + n > self.max_each:
            whose = "your API key's files" if tenant else "all files"
            message = f"{whose} have {have} bytes, and {self.max_each} are allowed {flag}"
            raise StoreFull(f"{message}; delete some")
        if self.n_bytes + n > self.max_bytes:  # how much others have is not this client's business
            message = f"all clients' files together would have more than {self.max_bytes} bytes {flag}"
            raise StoreFull(f"{message}; try again later")
        self.count_bytes(tenant, n)

    def count_bytes(self, tenant: str, n: int) -> None:
        """Add `n` bytes, which may be negative, to a tenant's count, whatever the limits."""
        left = self._n_bytes.get(tenant, 0) + n
        self._n_bytes[tenant] = left
        if not left:
            del self._n_bytes[tenant]

    def _check(self, stored: StoredFile) -> None:
        """Log a file whose content is missing or has another size. Keep it: a backup may have the content."""
        try:
            n_bytes = self._path(stored.id, _DATA).stat().st_size
        except OSError as error:
            _LOGGER.error("the content of %s cannot be read: %s; it is kept", stored.id, error)
        else:
            if n_bytes != stored.n_bytes:
                _LOGGER.error("%s has %d bytes and should have %d", stored.id, n_bytes, stored.n_bytes)

    def _remove_later(self, file_id: str) -> None:
        """Remove a file that is no longer visible; if the disk fails now, at the next start."""
        try:
            self._remove(file_id)
        except Exception:  # OSError and sqlite3.Error: the file's row stays, and the next start reads it
            _LOGGER.warning("%s is removed at the next start", file_id, exc_info=True)

    def _remove(self, file_id: str) -> None:
        for kind in (_GROWING, _DATA):
            self._path(file_id, kind).unlink(missing_ok=True)
        with self._database.change() as change:
            change.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def _path(self, file_id: str, kind: str) -> Path:
        return self._folder / f"{file_id}{kind}"


def write_all(file: int, data: bytes) -> None:
    """Write all bytes, although one system call may write only some."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def sync_folder(folder: Path) -> None:
    """Wait until the names in the folder are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def refuse_older_form(folder: Path, names: Sequence[str]) -> None:
    """Raise ConfigError for a folder of version 0.2, which kept JSON files and no database."""
    old: list[Any] = [path for name in names for path in sorted((folder / name).glob("*.json"))[:1]]
    if old:
        raise ConfigError(
            f"batch_dir is {str(folder)!r}, where {old[0].name} is of orca_jax 0.2; let that version finish "
            "its batches and download their files, then give a new folder. Nothing was changed"
        )
