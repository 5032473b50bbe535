"""A running batch: its open files, and which of its lines have a result. For the batches' thread."""

from collections.abc import Sequence
from typing import IO

from server.batches.batch import Batch, Status
from server.batches.files import FileStore, Finished, GrowingFile
from server.batches.lines import InputLine, ReadMembers, Validation, error_line, next_line
from server.batches.results import Result
from server.batches.table import BatchTable

_AT_ONCE = 200  # lines in one call on the thread
_EXPIRED = "the batch expired before this request ran"


class RunningBatch:
    """Reads a batch's lines and writes its results. After `close` the batch can be opened again."""

    def __init__(
        self, batch: Batch, store: FileStore, table: BatchTable, *, max_line: int, members: ReadMembers
    ) -> None:
        """Raises UnknownFile, StoreFull, OSError and sqlite3.Error."""
        self.batch = batch
        self._store, self._table, self._members = store, table, members
        self._again: list[InputLine] = []
        self._n_read = 0  # lines that `next_line` has read from the input
        self._input: IO[bytes] = store.open(store.get(batch.input_file_id, batch.tenant))
        try:
            self._validation = Validation(self._input, batch.endpoint, max_line, members)
            self._results = table.results_of(batch)
        except BaseException:
            self._input.close()
            raise
        self._count()

    def validate(self) -> bool:
        """Check some lines of the input. False when all have been checked."""
        if self._validation.read(_AT_ONCE):
            return True
        with self._table.changing(self.batch) as batch:
            batch.errors = self._validation.errors
            if batch.errors:
                batch.become("failed")
            else:
                batch.total = self._validation.n_lines
                batch.become("in_progress")
        self.rewind()
        return False

    def next_line(self) -> InputLine | None:
        """The next line to run; None if none is left."""
        if self._again:
            return self._again.pop()
        line, self._n_read = next_line(
            self._input, self.batch.endpoint, self._n_read, self._results.done, self._members
        )
        return line

    @property
    def has_more(self) -> bool:
        """Whether a line was given back."""
        return bool(self._again)

    def rewind(self) -> None:
        """Read the lines again from the first that has no result."""
        self._again.clear()
        self._input.seek(0)
        self._n_read = 0

    def give_back(self, line: InputLine) -> None:
        """Let a line run again later."""
        self._again.append(line)

    def record(self, results: Sequence[Result]) -> None:
        """Write results. Raises StoreFull, OSError or sqlite3.Error, and then has written none."""
        self._results.record(results)
        self._count()

    def expire(self) -> bool:
        """Write errors for some lines that have not run. False when none is left. Raises as `record` does."""
        lines = [line for _ in range(_AT_ONCE) if (line := self.next_line()) is not None]
        code = "batch_expired"
        self.record(
            [Result(line.number, False, error_line(line.custom_id, code, _EXPIRED)) for line in lines]
        )
        return len(lines) == _AT_ONCE

    def finalize(self) -> None:
        """Set the status `finalizing`: every line has a result. Raises sqlite3.Error."""
        with self._table.changing(self.batch) as batch:
            batch.become("finalizing")

    def finish(self, status: Status) -> None:
        """Publish the batch's files, unless empty, and its end, in one transaction.

        Raises OSError, sqlite3.Error and StoreFull, and then nothing has changed, so that the caller can try
        again.
        """
        growing: list[GrowingFile] = []
        try:
            files: dict[str, Finished] = {}
            for kind in ("output", "error"):
                places = self._results.places(ok=kind == "output")
                if not places:
                    continue
                file = self._store.begin(self.batch.tenant, counted=False)
                growing.append(file)
                self._results.copy(places, file)
                files[kind] = Finished(file, f"{self.batch.id}_{kind}.jsonl", "batch_output")
            self._table.finish(self.batch, status, files)
        except BaseException:
            for file in growing:
                file.abandon()
            raise
        self.close()
        self._table.remove_results([self.batch.id])

    def close(self) -> None:
        """Close the files."""
        self._input.close()
        self._results.close()

    def _count(self) -> None:
        self.batch.completed, self.batch.failed = self._results.n_ok, self._results.n_failed
