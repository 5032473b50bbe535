"""The results of a running batch's lines: all in one file, with each one's position in the database.

A line has a result if and only if the database has its row, which is written once the bytes are on the disk.
A server that is killed at any moment therefore runs again every line without a row, and no line with one.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from server.batches.database import Database
from server.batches.files import FileStore, GrowingFile, write_all

SUFFIX = ".results"


class Result(NamedTuple):
    """A line's result, as a line of JSON: for the output file if `ok`, else for the error file."""

    line: int
    ok: bool
    data: bytes


class Results:
    """The open results of one batch, which count among its tenant's bytes."""

    def __init__(
        self, folder: Path, batch_id: str, tenant: str, store: FileStore, database: Database
    ) -> None:
        """Open them, with those that an earlier run of the server wrote. Raises OSError and sqlite3.Error."""
        self._batch_id, self._tenant = batch_id, tenant
        self._store, self._database = store, database
        query = "SELECT line, ok, start + n_bytes FROM results WHERE batch = ?"
        rows = database.read(query, batch_id)
        self.done = {line for line, _, _ in rows}
        self.n_ok = sum(ok for _, ok, _ in rows)
        self._end = max((end for _, _, end in rows), default=0)
        self._file = os.open(path_of(folder, batch_id), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self._file, self._end)  # bytes after it belong to results that were not kept
            store.count_bytes(tenant, self._end)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def n_failed(self) -> int:
        return len(self.done) - self.n_ok

    def record(self, results: Sequence[Result]) -> None:
        """Write results of lines without one.

        Raises StoreFull, OSError or sqlite3.Error, and then has written none.
        """
        data = b"".join(result.data for result in results)
        self._store.take_bytes(self._tenant, len(data))
        try:
            os.lseek(self._file, self._end, os.SEEK_SET)
            write_all(self._file, data)
            os.fdatasync(self._file)
            with self._database.change() as change:
                start = self._end
                for line, ok, one in results:
                    row = (self._batch_id, line, int(ok), start, len(one))
                    change.execute("INSERT INTO results VALUES (?, ?, ?, ?, ?)", row)
                    start += len(one)
        except BaseException:
            self._store.count_bytes(self._tenant, -len(data))
            raise
        self._end += len(data)
        self.done.update(result.line for result in results)
        self.n_ok += sum(result.ok for result in results)

    def places(self, *, ok: bool) -> list[tuple[int, int]]:
        """The start and size of each result in the output or the error file, in the order of the input."""
        query = "SELECT start, n_bytes FROM results WHERE batch = ? AND ok = ? ORDER BY line"
        return [(start, n_bytes) for start, n_bytes in self._database.read(query, self._batch_id, int(ok))]

    def copy(self, places: Sequence[tuple[int, int]], file: GrowingFile) -> None:
        """Append these results to a file."""
        for start, n_bytes in places:
            file.write(os.pread(self._file, n_bytes, start))

    def close(self) -> None:
        """Close them; they can be opened again."""
        if self._file >= 0:
            file, self._file = self._file, -1
            self._store.count_bytes(self._tenant, -self._end)
            os.close(file)


def path_of(folder: Path, batch_id: str) -> Path:
    """The file with the results of a batch."""
    return folder / f"{batch_id}{SUFFIX}"
