"""A log whose reader stops reading stops nobody: lines wait within bounds, then are dropped and counted."""

import fcntl
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.process.log_writer import LogHandler, LogStream, LogWriter
from tests.host.engines import SOON

PIPE_BYTES = 4096  # the smallest that Linux makes


class Pipe:
    """A small pipe with a log writer at its end."""

    def __init__(self, **bounds: int) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.log = LogWriter(self.writer, **bounds)

    def read_until(self, end: bytes) -> bytes:
        found = b""
        while not found.endswith(end):
            piece = os.read(self.reader, 1 << 16)
            assert piece
            found += piece
        return found


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe(most_lines=100)
    yield pipe
    os.close(pipe.reader)
    pipe.log.close(SOON)
    os.close(pipe.writer)


def test_lines_come_in_order(pipe: Pipe) -> None:
    handler = LogHandler(pipe.log, "%(levelname)s %(message)s")
    for i in range(20):
        handler.emit(logging.LogRecord("x", logging.WARNING, "", 0, "line %d caf\u00e9", (i,), None))
    print("end", file=LogStream(pipe.log, pipe.writer))
    expected = "".join(f"WARNING line {i} caf\u00e9\n" for i in range(20)) + "end\n"
    assert pipe.read_until(b"end\n").decode() == expected


def test_a_reader_that_stops_reading_costs_lines_and_no_time(pipe: Pipe) -> None:
    """The first lines fill the pipe and the queue. All others are dropped, and lines say how many.

    The writer may begin its first piece while lines still come. Lines dropped until then are reported at its
    end, the others after the next piece.
    """
    line = "x" * 99 + "\n"
    done = threading.Event()

    def fill() -> None:
        for _ in range(1000):
            pipe.log.put(line)
        done.set()

    threading.Thread(target=fill, daemon=True).start()
    assert done.wait(SOON), "putting a line waited"
    n_dropped = pipe.log.n_dropped
    assert 0 < n_dropped <= 900
    found, n_reported = b"", 0
    while n_reported < n_dropped:
        found += pipe.read_until(b"nobody read them\n")
        reports = re.findall(rb"^(\d+) log lines were dropped: nobody read them\n", found, re.MULTILINE)
        n_reported = sum(map(int, reports))
    assert n_reported == n_dropped
    assert found.count(line.encode()) == 1000 - n_dropped
    pipe.log.put("and on\n")
    assert pipe.read_until(b"and on\n") == b"and on\n"


def test_bytes_are_bounded_too() -> None:
    pipe = Pipe(most_bytes=10_000)
    for _ in range(50):
        pipe.log.put("x" * 999 + "\n")
    assert pipe.log.n_dropped >= 50 - 10 - PIPE_BYTES // 1000 - 1
    os.close(pipe.reader)
    pipe.log.close(SOON)
    os.close(pipe.writer)


def test_a_reader_that_is_gone_ends_the_thread(pipe: Pipe) -> None:
    os.close(pipe.reader)
    pipe.log.put("nobody\n")
    pipe.log._thread.join(SOON)
    assert not pipe.log._thread.is_alive()
    pipe.log.put("still nobody\n")
    pipe.reader = os.open(os.devnull, os.O_RDONLY)


def test_closing_writes_the_waiting_lines(tmp_path: Path) -> None:
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    log = LogWriter(file)
    for i in range(500):
        log.put(f"{i}\n")
    log.close(SOON)
    os.close(file)
    assert (tmp_path / "log").read_text().split() == [str(i) for i in range(500)]
