"""A line: messages between the engine's process and an endpoint process, over a pair of sockets.

A message is four bytes of length and a pickle. Both ends are this program, and nobody else can reach the
pair, so a pickle is as safe as the processes themselves.
"""

import pickle  # noqa: TID251 (both ends are this program)
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("!I")
MOST_BYTES = 256 << 20  # that wait to be sent: an end that reads nothing is given up
_READ_BYTES = 1 << 18
_END_SECONDS = 5.0  # for the writing thread, which a broken line wakes


def packed(message: object) -> bytes:
    """The bytes of a message."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Unpacker:
    """Makes messages of bytes as they arrive."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that `data` completes."""
        held = self._data
        held += data
        start, n_held = 0, len(held)
        with memoryview(held) as view:
            while n_held - start >= _LENGTH.size:
                end = start + _LENGTH.size + _LENGTH.unpack_from(view, start)[0]
                if end > n_held:
                    break
                message = pickle.loads(view[start + _LENGTH.size : end])
                start = end
                yield message
        del held[:start]


class Line:
    """The engine's end of a line. `send` is for any thread and never waits; one thread reads.

    Messages that the socket does not take at once wait for a thread of the line. If they are more than
    MOST_BYTES the line breaks, and `messages` ends.
    """

    def __init__(self, end: socket.socket, name: str) -> None:
        end.setblocking(True)
        self._socket = end
        self._unsent = deque[bytes]()
        self._n_bytes = 0
        self._is_broken = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write, name=f"orca-line-{name}", daemon=True)
        self._writer.start()

    def send(self, message: object) -> None:
        """Send a message; nothing happens on a broken line."""
        data = packed(message)
        with self._changed:
            if self._is_broken:
                return
            if not self._unsent:
                try:
                    n_sent = self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    n_sent = 0
                except OSError:
                    self._break()
                    return
                if n_sent == len(data):
                    return
                data = data[n_sent:]
            self._unsent.append(data)
            self._n_bytes += len(data)
            if self._n_bytes > MOST_BYTES:
                self._break()
            self._changed.notify()

    def messages(self) -> Iterator[Any]:
        """Yield the messages that arrive, until the line breaks or the other end closes it."""
        unpacker = Unpacker()
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                return
            if not data:
                return
            yield from unpacker.feed(data)

    def close(self) -> None:
        """Break the line, and close it once its threads are done with it."""
        with self._changed:
            self._break()
        self._writer.join(_END_SECONDS)
        self._socket.close()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._is_broken)
                if self._is_broken:
                    return
                data = self._unsent[0]
            try:
                self._socket.sendall(data)
            except OSError:
                with self._changed:
                    self._break()
                return
            with self._changed:
                self._unsent.popleft()
                self._n_bytes -= len(data)

    # Under the lock.

    def _break(self) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._unsent.clear()
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes both threads
            except OSError:
                pass
            self._changed.notify_all()
