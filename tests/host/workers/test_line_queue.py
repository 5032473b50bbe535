"""The queue of a child's lines: bounded in lines and in bytes, and its writer waits."""

import threading

import pytest

from orca_jax.workers.line_queue import LineQueue

SOON = 10.0  # seconds


def is_blocked(lines: LineQueue, line: bytes) -> threading.Thread:
    """A thread that tries to put this line and cannot yet."""
    writer = threading.Thread(target=lines.put, args=(line,), daemon=True)
    writer.start()
    writer.join(0.1)
    assert writer.is_alive()
    return writer


def test_lines_come_in_order_and_then_the_end() -> None:
    lines = LineQueue()
    lines.put(b"a\n")
    lines.put(b"b\n")
    lines.end()
    assert [lines.get(SOON), lines.get(SOON), lines.get(SOON), lines.get(0.0)] == [b"a\n", b"b\n", None, None]


def test_get_waits_no_longer_than_its_timeout() -> None:
    with pytest.raises(TimeoutError):
        LineQueue().get(0.01)


@pytest.mark.parametrize(("limit", "limit_bytes"), [(2, 1000), (1000, 6)])
def test_a_full_queue_blocks_its_writer_until_a_line_is_read(limit: int, limit_bytes: int) -> None:
    lines = LineQueue(limit=limit, limit_bytes=limit_bytes)
    lines.put(b"abc")
    lines.put(b"def")
    writer = is_blocked(lines, b"ghi")
    assert lines.get(SOON) == b"abc"
    writer.join(SOON)
    assert [lines.get(SOON), lines.get(SOON)] == [b"def", b"ghi"]


def test_an_empty_queue_takes_a_line_above_its_limit() -> None:
    lines = LineQueue(limit_bytes=2)
    lines.put(b"abc")
    assert lines.get(SOON) == b"abc"


def test_overflow_is_dropped_where_it_is_not_wanted() -> None:
    lines = LineQueue(limit=1)
    lines.put(b"kept")
    writer = is_blocked(lines, b"dropped")
    lines.discard_overflow()
    writer.join(SOON)
    lines.put(b"dropped too")
    lines.end()
    assert [lines.get(SOON), lines.get(SOON)] == [b"kept", None]
