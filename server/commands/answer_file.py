"""The output of `orca generate --output`: a record for each line, and how a later run goes on with the file.

The file is also the run's journal. Records are appended in the input's order, each by itself, so a run that
is killed leaves a file with the answers so far and at most one torn record. The next run reads it, checks
that each record answers the same line's request by the same model, and appends what is missing. A line that
is run again, because its record is an error, gets a second record at the end, and of the two the later
counts. Once all lines have records, a file that is not in order is put in order.
"""

import fcntl
import os
import re
import stat
import time
from array import array
from bisect import bisect_left
from typing import BinaryIO, NamedTuple

from server.errors import UsageError

# The beginning of every record; what follows is any JSON. `request_lines.py` makes the hashes.
_HEAD = re.compile(
    rb'\{"line": (\d{1,18}), "request_hash": "([0-9a-f]{16})", "model_hash": "([0-9a-f]{16})", ("error": )?'
)
OTHERWISE = "name another file, or replace this one with --overwrite"  # advice where a file must not change
_FIRST = b'{"line": '
_HEAD_BYTES = 256  # more than a head has
_PIECE_BYTES = 1 << 16
_SYNC_SECONDS = 5.0  # of work that a loss of power may cost


class Kept(NamedTuple):
    """An earlier run's record of a line."""

    request_hash: str
    is_error: bool


class _Head(NamedTuple):
    """The beginning of a record."""

    line: int
    request_hash: int
    model_hash: str
    is_error: bool


class AnswerFile:
    """A file of records, open for appending and locked against other runs. Takes 33 bytes of memory a record.

    `model_hash` is that of the records in it, None without any.
    """

    def __init__(self, file: BinaryIO, name: str, *, overwrite: bool = False) -> None:
        """Read an earlier run's records, or with `overwrite` plan to drop whatever the file has.

        Raises UsageError if the file has anything else than such records. Changes nothing in it.
        """
        self.name = name
        self.model_hash: str | None = None
        self._file = file
        # For each line with a record, in order: its number, the record's place, its request, is it an error.
        self._numbers, self._begins, self._ends = array("Q"), array("Q"), array("Q")
        self._hashes, self._errors = array("Q"), bytearray()
        self._end = 0  # of the last whole record
        self._has_rest = overwrite  # bytes after that
        self._is_sorted = True
        self._synced = time.monotonic()
        if not overwrite:
            self._read()

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def last_line(self) -> int:
        """The last line that has a record; 0 without any."""
        return self._numbers[-1] if self._numbers else 0

    def kept(self, line: int) -> Kept | None:
        """The record of this line of the input, if it has one."""
        i = bisect_left(self._numbers, line)
        if i == len(self._numbers) or self._numbers[i] != line:
            return None
        return Kept(f"{self._hashes[i]:016x}", bool(self._errors[i]))

    def append(self, record: bytes) -> None:
        """Write a record, with its line break. It counts from now on, even if the process is killed."""
        head = _head(record)
        assert head is not None, "a record has a head"
        self._drop_rest()
        self._file.seek(self._end)
        write_all(self._file, record)
        self._add(head, self._end + len(record))
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fdatasync(self._file.fileno())
            self._synced = time.monotonic()

    def finish(self) -> None:
        """Put the records in the input's order, each line's last one, and wait until they are on the disk."""
        self._drop_rest()
        if not self._is_sorted:
            self._sort()
        os.fsync(self._file.fileno())

    def _drop_rest(self) -> None:
        if self._has_rest:
            self._file.truncate(self._end)
            self._has_rest = False

    # Reading

    def _read(self) -> None:
        """Read the heads of all whole records. Holds no more than a piece of one at a time."""
        number = end = 0
        with os.fdopen(os.dup(self._file.fileno()), "rb", buffering=_PIECE_BYTES) as reader:
            while begin := reader.readline(_HEAD_BYTES):
                number += 1
                end, last = end + len(begin), begin
                while not last.endswith(b"\n") and (piece := reader.readline(_PIECE_BYTES)):
                    end, last = end + len(piece), last[-1:] + piece
                if not last.endswith(b"\n"):  # the last one: the run was killed while writing it
                    if not _may_be_torn(begin):
                        raise self._not_ours(number)
                    self._has_rest = True
                    return
                head = _head(begin)
                if head is None or not last.endswith(b"}\n"):
                    raise self._not_ours(number)
                if self.model_hash not in (None, head.model_hash):
                    raise UsageError(f"{self.name} has answers of two models; {OTHERWISE}")
                self.model_hash = head.model_hash
                self._add(head, end)

    def _not_ours(self, number: int) -> UsageError:
        return UsageError(
            f"{self.name} exists, and its line {number} is not an answer that orca generate --output "
            f"wrote; {OTHERWISE}"
        )

    def _add(self, head: _Head, end: int) -> None:
        """Count the record with this head, which follows the last one."""
        values = (head.line, self._end, end, head.request_hash, head.is_error)
        columns = (self._numbers, self._begins, self._ends, self._hashes, self._errors)
        i = len(self._numbers)
        if head.line <= self.last_line:
            self._is_sorted = False
            i = bisect_left(self._numbers, head.line)
        is_again = i < len(self._numbers) and self._numbers[i] == head.line
        for column, value in zip(columns, values, strict=True):
            if is_again:
                column[i] = value
            else:
                column.insert(i, value)
        self._end = end

    # Sorting

    def _sort(self) -> None:
        """Replace the file by a sorted one. At any moment the old or the new file is there, complete."""
        path = os.path.realpath(self.name)
        sorted_path = f"{path}.sorting"
        try:
            with open(sorted_path, "wb") as into:
                os.fchmod(into.fileno(), stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
                for begin, end in zip(self._begins, self._ends, strict=True):
                    self._copy(begin, end, into)
                into.flush()
                os.fsync(into.fileno())
            os.replace(sorted_path, path)
            folder = os.open(os.path.dirname(path), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise UsageError(
                f"{self.name} has all answers, but cannot be put in the order of the lines: "
                f"{error.strerror}; the same command tries again"
            ) from error

    def _copy(self, begin: int, end: int, into: BinaryIO) -> None:
        while begin < end:
            piece = os.pread(self._file.fileno(), min(end - begin, _PIECE_BYTES), begin)
            if not piece:
                raise UsageError(f"{self.name} was cut by another program; start again")
            into.write(piece)
            begin += len(piece)


class AnswerStream:
    """Records written to stdout or a pipe: none can be read back, so no run can continue them."""

    name = ""
    model_hash: str | None = None
    last_line = 0

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink

    def __len__(self) -> int:
        return 0

    def kept(self, line: int) -> None:
        """No line has a record."""

    def append(self, record: bytes) -> None:
        write_all(self._sink, record)

    def finish(self) -> None:
        """All lines have records."""


Answers = AnswerFile | AnswerStream


def locked_answers(file: BinaryIO, name: str, *, overwrite: bool) -> AnswerFile:
    """The records of a regular file, which no other run writes until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"another orca generate writes {name}; wait for it, or name another file") from error
    except OSError:
        pass  # a file system without locks
    return AnswerFile(file, name, overwrite=overwrite)


def write_all(sink: BinaryIO, data: bytes) -> None:
    """Write all of `data`, to a file without a buffer too. Raises UsageError, or BrokenPipeError."""
    try:
        while data:
            data = data[sink.write(data) :]
        sink.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"cannot write the output: {error.strerror}") from error


def _head(record: bytes) -> _Head | None:
    """The head of a record, None for anything else."""
    found = _HEAD.match(record)
    if found is None:
        return None
    line, request, model, error = found.groups()
    return _Head(int(line), int(request, 16), model.decode("ascii"), error is not None)


def _may_be_torn(begin: bytes) -> bool:
    """Whether these bytes, up to _HEAD_BYTES, may be the beginning of a record."""
    return begin.startswith(_FIRST[: len(begin)]) and (
        len(begin) < _HEAD_BYTES or _HEAD.match(begin) is not None
    )
