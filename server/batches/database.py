"""The store's database: the files, the batches, and the position of each line's result.

It is a file of SQLite in the folder with the contents. Call the methods on the batches' thread; the
constructor runs before that thread exists. A change is a transaction, which happens entirely or not at all.
"""

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orca_jax.errors import ConfigError
from server.errors import DiskFull, StoreFailed

NAME = "store.sqlite"
_LOCK = "lock"
_VERSION = 1  # of the tables; a program that changes them uses the next number
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))

_TABLES = """
CREATE TABLE files (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('growing', 'whole', 'deleted')),
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    n_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;
CREATE TABLE batches (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    value TEXT NOT NULL -- a Batch as JSON
) STRICT;
CREATE TABLE results (
    batch TEXT NOT NULL,
    line INTEGER NOT NULL, -- of the input, from 0, without blank ones
    ok INTEGER NOT NULL,
    start INTEGER NOT NULL, -- in the batch's file of results
    n_bytes INTEGER NOT NULL,
    PRIMARY KEY (batch, line)
) STRICT, WITHOUT ROWID;
"""


class Database:
    """The database in `folder`, for one server at a time."""

    def __init__(self, folder: Path) -> None:
        """Open the database, or create it. Raises ConfigError, which says what to do."""
        path = folder / NAME
        self._lock = _locked(folder)
        try:
            is_new = not path.exists()
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            os.chmod(path, 0o600)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if is_new or not version:
                self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")
            elif version != _VERSION:
                raise ConfigError(
                    f"batch_dir: {path} has tables of version {version}, and this program reads {_VERSION}; "
                    "start the version of orca_jax that wrote it, or give another folder"
                )
            (damage,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if damage != "ok":
                raise ConfigError(
                    f"batch_dir: {path} is damaged ({damage}); restore it from a backup, or move the folder "
                    "away to begin with an empty one. Nothing was changed"
                )
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise unusable(path, error) from error
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Close the database, and let another server have the folder."""
        database = getattr(self, "_db", None)
        if database is not None:
            database.close()
        os.close(self._lock)

    def read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return self._db.execute(query, values).fetchall()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction, which an exception undoes."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite may have undone it already, for example on a full disk
                self._db.execute("ROLLBACK")
            raise


def unusable(path: Path, error: OSError | sqlite3.Error) -> ConfigError:
    """The error for a store that cannot be opened, because of its folder or of a file in it."""
    return ConfigError(
        f"batch_dir: {str(path)!r} cannot be used: {error}. Check the disk and who may read and write there, "
        "or give another folder. Nothing was deleted"
    )


def store_error(error: OSError | sqlite3.Error) -> StoreFailed:
    """The error for clients when the disk or the database fails."""
    if isinstance(error, OSError):
        reason, is_full = error.strerror or str(error), error.errno in _FULL
    else:
        reason, is_full = str(error), getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    if is_full:
        return DiskFull(f"the server's disk is full, so nothing was changed ({reason}); try again later")
    return StoreFailed(f"the server's disk failed, so nothing was changed ({reason}); try again later")


def _locked(folder: Path) -> int:
    """Lock the folder until the returned file is closed. Raises ConfigError if it is locked already."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unusable(folder, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(
            f"batch_dir is {str(folder)!r}, which another server uses; give each server its own folder"
        ) from error
    return lock
