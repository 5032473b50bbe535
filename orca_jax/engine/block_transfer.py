"""Block transfer over TCP: the reference transport of prompts' blocks between two servers.

A connection is for one lease. The server speaks first; both sides prove that they know the control secret by
an HMAC over the other's fresh number, so that the secret itself never travels:

    server: magic, number [32]
    client: a frame of JSON: lease, digest, first, n, number, proof
    server: a frame of JSON: status, proof
    server: pieces until all n blocks are sent and the lease is whole, each a frame of JSON: n, n_bytes,
            whole, first_token, and these bytes: n blocks, one after another, the last of which may be a state
            of recurrent layers

A piece is sent as soon as its blocks are computed. A whole lease may say the first token of the output.
Blocks go from the arrays that they were gathered into to the place that they are read from, without a copy
in this process. Every wait has a deadline, which each piece renews.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from orca_jax.errors import ConfigError
from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.scheduling.arriving_blocks import Receiver
from orca_jax.scheduling.leases import Lease, Leases

_log = logging.getLogger(__name__)

_MAGIC = b"orca-kv3"
_NUMBER = 32  # bytes
_LENGTH = struct.Struct("<I")
_MOST_FRAME = 4096
_OK, _GONE, _REFUSED = "ok", "no such lease", "wrong secret"
_BUFFERS, _CALL_BYTES = 256, 4 << 20  # the most for one system call
_LOOK_SECONDS = 0.5
_BACKLOG = 64
_MOST_CONNECTIONS = 128
_SEND_SECONDS = 30.0
_FETCHES = 8  # at the same time, many of which wait for prompts' next chunks
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
            _send_frame(connection, {"status": _OK, "proof": proof}, ends)
            _send_pieces(connection, leases, lease, first, n)
        finally:
            leases.sent(lease)


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A fetch, as `Transport.fetch` describes it. The first blocks come by `ends`."""

    params: KVTransferParams
    digest: bytes
    first: int
    into: Sequence[Sequence[memoryview]]
    receiver: Receiver
    seconds_each: float
    ends: float


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
        receiver: Receiver,
        seconds: float,
        seconds_each: float,
    ) -> None:
        fetch = _Fetch(params, digest, first, into, receiver, seconds_each, time.monotonic() + seconds)
        with self._lock:
            may_wait = not self._closing and self._n_waiting < _MOST_WAITING
            self._n_waiting += may_wait
            if may_wait:
                self._pool.submit(self._run, fetch)
        if not may_wait:
            receiver.done(False)

    def close(self) -> None:
        """End all fetches and threads. A second call does nothing."""
        with self._lock:
            self._closing = True
            for connection in self._connections:
                _shut(connection)
        self._pool.shutdown(wait=True)

    def _run(self, fetch: _Fetch) -> None:
        ok = False
        try:
            with self._lock:
                self._n_waiting -= 1
            self._fetch(fetch)
            ok = True
        except Exception as error:
            if not self._closing:
                at = f"{fetch.params.remote_host}:{fetch.params.remote_port}"
                why = "a prompt's blocks did not come from %s, so it is computed here: %s"
                _log.warning(why, at, error or type(error).__name__)
        finally:
            fetch.receiver.done(ok)

    def _fetch(self, fetch: _Fetch) -> None:
        address = (fetch.params.remote_host, fetch.params.remote_port)
        with socket.create_connection(address, timeout=_left(fetch.ends)) as connection:
            try:
                with self._lock:
                    if self._closing:
                        raise ConnectionError("the engine closes")
                    self._connections.add(connection)
                self._greet(connection, fetch)
                if fetch.into:
                    _receive_pieces(connection, fetch)
            finally:
                with self._lock:
                    self._connections.discard(connection)

    def _greet(self, connection: socket.socket, fetch: _Fetch) -> None:
        """Ask for the blocks. Raises ConnectionError if the other side lacks the secret or the lease."""
        _prepare(connection)
        hello = bytearray(len(_MAGIC) + _NUMBER)
        _receive(connection, [memoryview(hello)], fetch.ends)
        server_number, client_number = bytes(hello[len(_MAGIC) :]), os.urandom(_NUMBER)
        if not hello.startswith(_MAGIC):
            raise ConnectionError("this is no server of leased blocks")
        name, digest = fetch.params.remote_request_id, fetch.digest
        asked = {
            "lease": name,
            "digest": digest.hex(),
            "first": fetch.first,
            "n": len(fetch.into),
            "number": client_number.hex(),
            "proof": self._facts.proof(b"client", server_number, client_number, name.encode(), digest).hex(),
        }
        _send_frame(connection, asked, fetch.ends)
        answer = _receive_frame(connection, fetch.ends)
        if answer.get("status") != _OK:
            raise ConnectionError(f"the server says: {str(answer.get('status'))[:80]}")
        if not hmac.compare_digest(
            self._facts.proof(b"server", client_number, server_number).hex(), str(answer["proof"])
        ):
            raise ConnectionError("the server does not know the control secret")


def _send_pieces(connection: socket.socket, leases: Leases, lease: Lease, first: int, n: int) -> None:
    """Send `n` blocks of a lease, each as soon as it is there, and the first token. Nothing for no blocks."""
    sent, end, whole = first, first + n, not n
    while not whole or sent < end:
        ready = leases.wait(lease, sent, _SEND_SECONDS)
        if ready is None:
            raise ConnectionError("its prompt is not computed")
        upto, whole = min(ready[0], end), ready[1]
        parts = [part for i in range(sent, upto) for part in lease.parts(i)]
        frame: dict[str, Any] = {"n": max(0, upto - sent), "n_bytes": sum(part.nbytes for part in parts)}
        frame |= {"whole": whole, "first_token": lease.first_token if whole else None}
        ends = time.monotonic() + _SEND_SECONDS
        _send_frame(connection, frame, ends)
        _send(connection, parts, ends)
        sent = max(sent, upto)


def _receive_pieces(connection: socket.socket, fetch: _Fetch) -> None:
    """Receive all blocks of a fetch. Raises ConnectionError if pieces do not fit, or come no more."""
    n, whole, ends = 0, False, fetch.ends
    while not whole or n < len(fetch.into):
        frame = _receive_frame(connection, ends)
        n_new, whole = int(frame["n"]), bool(frame["whole"])
        if n_new < 0 or n + n_new > len(fetch.into) or not (n_new or whole):
            raise ConnectionError(f"{n_new} blocks came after {n} of {len(fetch.into)}")
        parts = [part for block in fetch.into[n : n + n_new] for part in block]
        if frame["n_bytes"] != (n_bytes := sum(part.nbytes for part in parts)):
            raise ConnectionError(f"these blocks have {frame['n_bytes']} bytes there, and {n_bytes} here")
        if whole and frame["first_token"] is not None:
            token_id, proof = frame["first_token"]
            fetch.receiver.said(int(token_id), str(proof))
        _receive(connection, parts, ends)
        n += n_new
        fetch.receiver.arrived(n)
        ends = time.monotonic() + fetch.seconds_each


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
