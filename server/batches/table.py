"""All batches of a server, in the database and in memory. Change them only on the batches' thread."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from sqlite3 import Connection

from orca_jax.errors import ConfigError
from server.batches.batch import Batch, Status
from server.batches.database import NAME, Database
from server.batches.files import FileStore, Finished
from server.batches.results import Results, path_of
from server.errors import UnknownBatch

_LOGGER = logging.getLogger("orca")


class BatchTable:
    """Holds the batches. While a batch runs, its results are in `folder`."""

    def __init__(self, folder: Path, database: Database, store: FileStore) -> None:
        """Read what is there. Raises ConfigError, OSError and sqlite3.Error."""
        self._folder, self._database, self._store = folder, database, store
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._batches: dict[str, Batch] = {}
        for batch_id, value in database.read("SELECT id, value FROM batches"):
            try:
                self._batches[batch_id] = Batch(**json.loads(value))
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"batch_dir: the batch {batch_id} in {NAME} cannot be read ({error}); start the version "
                    "of orca_jax that wrote it, or give another folder. Nothing was changed"
                ) from error
        self.remove_results(batch.id for batch in self._batches.values() if batch.ended)

    def of(self, tenant: str) -> list[Batch]:
        """A tenant's batches, the newest first."""
        found = [batch for batch in list(self._batches.values()) if batch.tenant == tenant]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def get(self, batch_id: str, tenant: str) -> Batch:
        """The tenant's batch with this id. Raises UnknownBatch."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.tenant != tenant:
            raise UnknownBatch(f"there is no batch {batch_id[:100]!r}")
        return batch

    def unfinished(self) -> list[Batch]:
        """Batches that have not ended, the oldest first."""
        left = [batch for batch in list(self._batches.values()) if not batch.ended]
        return sorted(left, key=lambda batch: (batch.created_at, batch.id))

    def add(self, batch: Batch, *, instead_of: Iterable[Batch] = ()) -> None:
        """Add a batch, and forget others, which have ended.

        Raises sqlite3.Error, and then nothing has changed.
        """
        forgotten = [one.id for one in instead_of]
        with self._database.change() as change:
            row = (batch.id, batch.tenant, json.dumps(asdict(batch)))
            change.execute("INSERT INTO batches VALUES (?, ?, ?)", row)
            change.executemany("DELETE FROM batches WHERE id = ?", [(one,) for one in forgotten])
        self._batches[batch.id] = batch
        for one in forgotten:
            del self._batches[one]

    @contextmanager
    def changing(self, batch: Batch) -> Iterator[Batch]:
        """Yield a copy to change; it is written, and then copied back to the batch. Raises sqlite3.Error."""
        changed = Batch(**asdict(batch))
        yield changed
        with self._database.change() as change:
            change.execute(_UPDATE, (json.dumps(asdict(changed)), batch.id))
        batch.become_like(changed)

    def finish(self, batch: Batch, status: Status, files: Mapping[str, Finished]) -> None:
        """End a batch, with its `output` and `error` files if it has them, in one transaction."""
        changed = Batch(**asdict(batch))
        for kind, (file, _, _) in files.items():
            setattr(changed, f"{kind}_file_id", file.id)
        if changed.status != status:
            changed.become(status)
        row = (json.dumps(asdict(changed)), batch.id)

        def change_batch(change: Connection) -> None:
            change.execute(_UPDATE, row)
            change.execute("DELETE FROM results WHERE batch = ?", (batch.id,))

        self._store.finish(list(files.values()), change_batch)
        batch.become_like(changed)

    def results_of(self, batch: Batch) -> Results:
        """Open the results of a batch. Raises OSError and sqlite3.Error."""
        return Results(self._folder, batch.id, batch.tenant, self._store, self._database)

    def remove_results(self, batch_ids: Iterable[str]) -> None:
        """Remove the results of ended batches; those that the disk does not remove go at the next start."""
        for batch_id in batch_ids:
            try:
                path_of(self._folder, batch_id).unlink(missing_ok=True)
            except OSError:
                _LOGGER.warning("the results of %s are removed at the next start", batch_id, exc_info=True)


_UPDATE = "UPDATE batches SET value = ? WHERE id = ?"
