"""A batch that runs: its open files, and which of its lines have a result. For the batches' thread."""

from pathlib import Path
from typing import IO

from server.batches.batch import Batch, Status
from server.batches.files import FileStore, GrowingFile, write_whole
from server.batches.lines import InputLine, Validation, done_in, error_line, next_line

_KINDS = ("output", "error")  # of results: of requests that were answered, and of those that failed
_EXPIRED = "the batch expired before this request ran"


class RunningBatch:
    """Opened once its input is known to be there; `close` leaves all for the next start of the server."""

    def __init__(self, batch: Batch, store: FileStore, path: Path, *, max_line: int) -> None:
        """Raises UnknownFile and OSError."""
        self.batch = batch
        self._store, self._path = store, path
        self._input: IO[bytes] = store.open(store.get(batch.input_file_id, batch.tenant))
        self._validation = Validation(self._input, batch.endpoint, max_line)
        self._done: set[str] = set()
        self._again: list[InputLine] = []
        self._results: dict[str, GrowingFile] = {}  # by _KINDS, while results may come
        if batch.output_id is not None:
            self._reopen()

    def validate(self, n: int) -> bool:
        """Read `n` lines of the input; False when it is read."""
        if self._validation.read(n):
            return True
        batch = self.batch
        batch.errors = self._validation.errors
        if batch.errors:
            batch.become("failed")
        else:
            batch.total = self._validation.n_lines
            for kind in _KINDS:
                self._results[kind] = self._store.begin(batch.tenant)
            batch.output_id, batch.error_id = (self._results[kind].id for kind in _KINDS)
            batch.become("in_progress")
            self._input.seek(0)
        self.save()
        return False

    def next_line(self) -> InputLine | None:
        """The next line to run; None if none is left."""
        if self._again:
            return self._again.pop()
        return next_line(self._input, self.batch.endpoint, self._done.__contains__)

    def give_back(self, line: InputLine) -> None:
        """Let a line run again later."""
        self._again.append(line)

    def record(self, result: bytes, *, success: bool) -> None:
        """Write a result. Raises StoreFull."""
        file = self._results["output" if success else "error"]
        file.write(result)
        file.flush()
        if success:
            self.batch.completed += 1
        else:
            self.batch.failed += 1

    def expire(self, n: int) -> bool:
        """Give `n` lines that have not run an error each; False when none is left. Raises StoreFull."""
        for _ in range(n):
            line = self.next_line()
            if line is None:
                return False
            self.record(error_line(line.custom_id, "batch_expired", _EXPIRED), success=False)
        return True

    def finish(self, status: Status) -> None:
        """Let the client see the files, but no empty one, and then that the batch has ended.

        Raises OSError.
        """
        batch = self.batch
        self._input.close()
        for kind in _KINDS:
            # Each once: the disk may fail, and then this runs again, to end the batch as "failed".
            file = self._results.pop(kind, None)
            if file is None:
                continue
            if not file.n_bytes:
                file.abandon()
                continue
            stored = file.finish(f"{batch.id}_{kind}.jsonl", "batch_output")
            setattr(batch, f"{kind}_file_id", stored.id)
        batch.output_id = batch.error_id = None
        if batch.status != status:
            batch.become(status)
        self.save()

    def close(self) -> None:
        """Close the files; the batch goes on when it is opened again."""
        for file in (self._input, *self._results.values()):
            file.close()

    def save(self) -> None:
        """Write the batch's state."""
        write_whole(self._path, self.batch.stored())

    def _reopen(self) -> None:
        batch = self.batch
        assert batch.output_id is not None and batch.error_id is not None
        self._results["output"], output = self._store.reopen(batch.output_id, batch.tenant)
        self._results["error"], errors = self._store.reopen(batch.error_id, batch.tenant)
        completed, failed = set(done_in(output)), set(done_in(errors))
        batch.completed, batch.failed = len(completed), len(failed)
        self._done = completed | failed
