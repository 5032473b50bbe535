"""Block transfer over TCP: the reference transport of prompts' blocks between two servers.

A connection is for one lease. The server speaks first; both sides prove that they know the control secret by
an HMAC over the other's fresh number, so that the secret itself never travels:

    server: magic, number [32]
    client: a frame of JSON: lease, digest, first, n, number, proof
    server: a frame of JSON: status, n_bytes, proof
    server: these bytes: n blocks, one after another, the last of which may be a state of recurrent layers

Blocks go from the arrays that they were gathered into to the place that they are read from, without a copy
in this process. Every wait has a deadline.
"""

import hmac
import json
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from orca_jax.errors import ConfigError
from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.scheduling.leases import Leases

_log = logging.getLogger(__name__)

_MAGIC = b"orca-kv2"
_NUMBER = 32  # bytes
_LENGTH = struct.Struct("<I")
_MOST_FRAME = 4096
_OK, _GONE, _REFUSED = "ok", "no such lease", "wrong secret"
_BUFFERS, _CALL_BYTES = 256, 4 << 20  # the most for one system call
_LOOK_SECONDS = 0.5
_BACKLOG = 64
_MOST_CONNECTIONS = 32
_SEND_SECONDS = 30.0
_FETCHES = 4  # at the same time
_MOST_WAITING = 1024  # fetches that wait for a thread


class LeaseServer:
    """Sends leased blocks to other servers. Raises ConfigError if `host` and `port` cannot be used.

    Port 0 is any free port. A connection beyond the most is closed at once.
    """

    def __init__(self, host: str, port: int, facts: TransferFacts) -> None:
        self._facts = facts
        self._leases: Leases | None = None
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_address is {host}:{port}, which cannot be used: {error}"
            ) from error
        self._listener.settimeout(_LOOK_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="orca-kv-leases", daemon=True)

    def start(self, leases: Leases) -> None:
        """Begin to send these leases."""
        self._leases = leases
        self._thread.start()

    def close(self) -> None:
        """End all connections and threads. A second call does nothing."""
        self._closing = True
        _shut(self._listener)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                _shut(connection)
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        assert self._leases is not None
        while not self._closing:
            self._leases.expire()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closing:
                    return
                _log.warning("a connection for leased blocks failed: %s", error)
                time.sleep(_LOOK_SECONDS)  # such as too many open files
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            with self._lock:
                self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection, self._leases), name="orca-kv-lease", daemon=True
            ).start()

    def _serve(self, connection: socket.socket, leases: Leases) -> None:
        try:
            self._answer(connection, leases)
        except (OSError, ValueError, TypeError, KeyError) as error:  # the other side sees a closed connection
            if not self._closing:
                _log.info("a transfer of leased blocks ended early: %s", error)
        except Exception:  # such as a device that failed
            _log.warning("a transfer of leased blocks failed", exc_info=True)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()
            self._places.release()

    def _answer(self, connection: socket.socket, leases: Leases) -> None:
        ends = time.monotonic() + _SEND_SECONDS
        _prepare(connection)
        server_number = os.urandom(_NUMBER)
        _send(connection, [memoryview(_MAGIC + server_number)], ends)
        asked = _receive_frame(connection, ends)
        name, digest, client_number = (
            str(asked["lease"]),
            bytes.fromhex(asked["digest"]),
            bytes.fromhex(asked["number"]),
        )
        first, n = int(asked["first"]), int(asked["n"])
        right = self._facts.proof(b"client", server_number, client_number, name.encode(), digest)
        if not hmac.compare_digest(right, bytes.fromhex(asked["proof"])):
            _send_frame(connection, {"status": _REFUSED}, ends)
            return
        proof = self._facts.proof(b"server", client_number, server_number).hex()
        lease = leases.take(name, digest)
        if lease is None:
            _send_frame(connection, {"status": _GONE, "proof": proof}, ends)
            return
        try:
            if first < 0 or n < 0 or first + n > lease.n_parts:
                raise ValueError(f"{n} blocks from {first} on, of {lease.n_parts}")
            parts = [part for i in range(first, first + n) for part in lease.blocks.parts(i)]
            n_bytes = sum(part.nbytes for part in parts)
            _send_frame(connection, {"status": _OK, "proof": proof, "n_bytes": n_bytes}, ends)
            _send(connection, parts, ends)
        finally:
            leases.sent(lease)


class SocketTransport:
    """Fetches leased blocks over TCP (scheduling/arriving_blocks.py's Transport), on a few threads."""

    def __init__(self, facts: TransferFacts) -> None:
        self._facts = facts
        self._pool = ThreadPoolExecutor(_FETCHES, thread_name_prefix="orca-kv-fetch")
        self._lock = threading.Lock()
        self._n_waiting = 0
        self._connections: set[socket.socket] = set()
        self._closing = False

    def fetch(
        self,
        params: KVTransferParams,
        digest: bytes,
        first: int,
        into: Sequence[Sequence[memoryview]],
        done: Callable[[bool], object],
        seconds: float,
    ) -> None:
        ends = time.monotonic() + seconds
        with self._lock:
            may_wait = not self._closing and self._n_waiting < _MOST_WAITING
            self._n_waiting += may_wait
            if may_wait:
                self._pool.submit(self._run, params, digest, first, into, done, ends)
        if not may_wait:
            done(False)

    def close(self) -> None:
        """End all fetches and threads. A second call does nothing."""
        with self._lock:
            self._closing = True
            for connection in self._connections:
                _shut(connection)
        self._pool.shutdown(wait=True)

    def _run(
        self,
        params: KVTransferParams,
        digest: bytes,
        first: int,
        into: Sequence[Sequence[memoryview]],
        done: Callable[[bool], object],
        ends: float,
    ) -> None:
        ok = False
        try:
            with self._lock:
                self._n_waiting -= 1
            self._fetch(params, digest, first, into, ends)
            ok = True
        except Exception as error:
            if not self._closing:
                at = f"{params.remote_host}:{params.remote_port}"
                _log.warning("a prompt's blocks did not come from %s, so it is computed here: %s", at, error)
        finally:
            done(ok)

    def _fetch(
        self,
        params: KVTransferParams,
        digest: bytes,
        first: int,
        into: Sequence[Sequence[memoryview]],
        ends: float,
    ) -> None:
        address = (params.remote_host, params.remote_port)
        with socket.create_connection(address, timeout=_left(ends)) as connection:
            try:
                with self._lock:
                    if self._closing:
                        raise ConnectionError("the engine closes")
                    self._connections.add(connection)
                self._converse(connection, params.remote_request_id, digest, first, into, ends)
            finally:
                with self._lock:
                    self._connections.discard(connection)

    def _converse(
        self,
        connection: socket.socket,
        name: str,
        digest: bytes,
        first: int,
        into: Sequence[Sequence[memoryview]],
        ends: float,
    ) -> None:
        _prepare(connection)
        hello = bytearray(len(_MAGIC) + _NUMBER)
        _receive(connection, [memoryview(hello)], ends)
        server_number, client_number = bytes(hello[len(_MAGIC) :]), os.urandom(_NUMBER)
        if not hello.startswith(_MAGIC):
            raise ConnectionError("this is no server of leased blocks")
        asked = {
            "lease": name,
            "digest": digest.hex(),
            "first": first,
            "n": len(into),
            "number": client_number.hex(),
            "proof": self._facts.proof(b"client", server_number, client_number, name.encode(), digest).hex(),
        }
        _send_frame(connection, asked, ends)
        answer = _receive_frame(connection, ends)
        if answer.get("status") != _OK:
            raise ConnectionError(f"the server says: {str(answer.get('status'))[:80]}")
        if not hmac.compare_digest(
            self._facts.proof(b"server", client_number, server_number).hex(), str(answer["proof"])
        ):
            raise ConnectionError("the server does not know the control secret")
        parts = [part for block in into for part in block]
        if answer["n_bytes"] != (n := sum(part.nbytes for part in parts)):
            raise ConnectionError(f"these blocks have {answer['n_bytes']} bytes there, and {n} here")
        _receive(connection, parts, ends)


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        pass


def _left(ends: float) -> float:
    """The seconds until `ends`. Raises TimeoutError if there are none."""
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time for the transfer is over")
    return left


def _send_frame(connection: socket.socket, value: dict[str, Any], ends: float) -> None:
    text = json.dumps(value).encode()
    _send(connection, [memoryview(_LENGTH.pack(len(text)) + text)], ends)


def _receive_frame(connection: socket.socket, ends: float) -> dict[str, Any]:
    """Raises ValueError for what is no frame."""
    head = bytearray(_LENGTH.size)
    _receive(connection, [memoryview(head)], ends)
    (length,) = _LENGTH.unpack(head)
    if length > _MOST_FRAME:
        raise ValueError(f"a frame of {length} bytes; at most {_MOST_FRAME} are allowed")
    text = bytearray(length)
    _receive(connection, [memoryview(text)], ends)
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("a frame is no JSON object")
    return cast("dict[str, Any]", value)


def _send(connection: socket.socket, parts: Sequence[memoryview], ends: float) -> None:
    """Send all parts, many with each system call."""
    left = deque(parts)
    while left:
        connection.settimeout(_left(ends))
        _advance(left, connection.sendmsg(_first(left)))


def _receive(connection: socket.socket, parts: Sequence[memoryview], ends: float) -> None:
    """Fill all parts. Raises ConnectionError if the other side closes before."""
    left = deque(parts)
    while left:
        connection.settimeout(_left(ends))
        n = connection.recvmsg_into(_first(left))[0]
        if not n:
            raise ConnectionError("the other side closed the connection")
        _advance(left, n)


def _first(parts: deque[memoryview]) -> list[memoryview]:
    """The parts for one system call, which takes a few megabytes at most."""
    found: list[memoryview] = []
    n = 0
    for part in parts:
        found.append(part)
        n += part.nbytes
        if n >= _CALL_BYTES or len(found) == _BUFFERS:
            break
    return found


def _advance(parts: deque[memoryview], n: int) -> None:
    """Remove the first `n` bytes, and parts that have none left."""
    while parts and n >= parts[0].nbytes:
        n -= parts.popleft().nbytes
    if n:
        parts[0] = parts[0][n:]
