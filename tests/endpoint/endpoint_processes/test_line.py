"""Messages between processes: framing, order, and what a reader who stops reading costs."""

import socket
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.endpoint_processes import line as line_module
from server.endpoint_processes.line import Line, Unpacker, packed
from tests.host.engines import SOON

MESSAGES = st.lists(st.one_of(st.integers(), st.text(max_size=40), st.binary(max_size=3000)), max_size=8)


@given(messages=MESSAGES, cuts=st.lists(st.integers(1, 500), min_size=1, max_size=20))
def test_messages_arrive_however_they_are_cut(messages: list[object], cuts: Sequence[int]) -> None:
    data, unpacker, found, i = b"".join(map(packed, messages)), Unpacker(), list[object](), 0
    while data:
        size = cuts[i % len(cuts)]
        found += unpacker.feed(data[:size])
        data, i = data[size:], i + 1
    assert found == messages


def test_a_message_is_four_bytes_of_length_and_a_pickle() -> None:
    assert packed(None) == b"\0\0\0\4\x80\5N."


def test_messages_longer_than_the_socket_holds_keep_their_order() -> None:
    ours, theirs = socket.socketpair()
    one, other = Line(ours, "one"), Line(theirs, "other")
    sent = [i if i % 2 else bytes([i]) * 1_000_000 for i in range(20)]
    for message in sent:
        one.send(message)  # nobody reads yet, and it does not wait
    received = other.messages()
    assert [next(received) for _ in sent] == sent
    one.close()
    assert list(received) == []
    other.close()


def test_a_line_that_nobody_reads_breaks_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "MOST_BYTES", 3_000_000)
    ours, theirs = socket.socketpair()
    line = Line(ours, "test")
    ended = threading.Event()

    def read() -> None:
        assert list(line.messages()) == []
        ended.set()

    threading.Thread(target=read).start()
    for _ in range(3):
        line.send(bytes(1_000_000))
    assert not ended.is_set(), "within the bound, and what the socket holds"
    line.send(bytes(1_000_000))
    assert ended.wait(SOON), "both directions are closed"
    line.send("nothing happens any more")
    line.close()
    theirs.close()


def test_a_line_whose_other_end_is_gone_breaks() -> None:
    ours, theirs = socket.socketpair()
    line = Line(ours, "test")
    theirs.close()
    line.send(1)
    assert list(line.messages()) == []
    line.close()
