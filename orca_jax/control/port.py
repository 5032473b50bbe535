"""The answering end of control lines: a worker's port, with at most one stream from each of its two peers.

The peers are the engine master and the previous stage's worker. A caller with the wrong secret or other terms
is refused and changes nothing.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, cast

import grpc

from orca_jax.control.adapter_call import ADAPTER_METHOD, AdapterPiece, decode_pieces
from orca_jax.control.bounded_queue import FrameQueue
from orca_jax.control.frame import MAX_FRAME
from orca_jax.control.handshake import (
    JOINED,
    MASTER,
    MAX_SECRET,
    METHOD,
    OPTIONS,
    PREVIOUS,
    JoinTerms,
    WorkerAbout,
    about_metadata,
    control_address,
    data_address_of,
    disagreement,
    has_secret,
    role_of,
)
from orca_jax.errors import BadFrame, ConfigError

_CALLS = 8  # concurrent calls, including calls that will be refused
_STOP_SECONDS = 5.0
# Takes an adapter's epoch, version and pieces; False if the worker is not in that epoch. Raises BadFrame.
TakeAdapter = Callable[[int, int, Iterator[AdapterPiece]], bool]
_PROBE_SECONDS = 1.0  # to see whether a process listens on a unix socket, which answers at once if it does


class _Peer:
    """An accepted stream: its outgoing frames, and why this end breaks it."""

    def __init__(self, frames: int, data_address: str) -> None:
        self.data_address = data_address
        self.outbox = FrameQueue[bytes](frames, weigh=len)
        self.why = ""

    def end(self, why: str = "") -> None:
        """End the stream; keeps the first reason."""
        self.why = self.why or why
        self.outbox.end()


class ControlPort:
    """A worker's gRPC server at `address`: "host:port", "[v6]:port" or "unix:/absolute/path".

    The constructor binds the port, and `address` is the real one if port 0 was requested; callers retry until
    `open`. `deliver` takes each received frame, without blocking, on the peer's own thread; if it returns
    False because it has no room, that peer's line breaks. At most `frames` wait to be sent to one peer.
    `take_adapter` gets the engine master's adapters, on threads of the port.

    Raises ConfigError if the address is malformed or unavailable, or if other machines can reach it and there
    is no secret.
    """

    def __init__(
        self,
        address: str,
        *,
        terms: JoinTerms,
        secret: str,
        deliver: Callable[[bytes], bool],
        frames: int = 4096,
        take_adapter: TakeAdapter = lambda epoch, version, pieces: False,
    ) -> None:
        assert terms.dtype is not None, "a worker has a dtype"
        at = control_address(address)
        if len(secret.encode()) > MAX_SECRET:
            raise ConfigError(
                f"the control plane's secret has more than {MAX_SECRET} bytes; use a shorter one"
            )
        if not secret and not at.is_local():
            message = f"others can reach a worker that listens on {at.host!r}, and it has no secret; "
            raise ConfigError(message + "set the same secret for the server and all workers")
        self._terms = terms
        self._secret = secret
        self._deliver = deliver
        self._take_adapter = take_adapter
        self._frames = frames
        self._about: WorkerAbout | None = None  # None until `open`
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._readers: set[threading.Thread] = set()
        self._pool = ThreadPoolExecutor(_CALLS, thread_name_prefix="control port")
        self._server: Any = grpc.server(self._pool, options=OPTIONS, maximum_concurrent_rpcs=_CALLS)
        self._started = False
        service, method = METHOD.strip("/").split("/")
        handlers = {
            method: cast(Any, grpc.stream_stream_rpc_method_handler)(self._answer),
            ADAPTER_METHOD.split("/")[-1]: cast(Any, grpc.stream_unary_rpc_method_handler)(self._adapter),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        try:
            if at.path and _is_in_use(at.path):  # gRPC would take the socket over from its listener
                raise RuntimeError("another process listens there")
            port: int = self._server.add_insecure_port(str(at))
        except RuntimeError as error:
            self._pool.shutdown()
            message = f"a worker cannot listen on {at}: {error}; choose another address or port"
            raise ConfigError(message) from error
        self.address = str(at if at.path else at._replace(port=port))

    def open(self, about: WorkerAbout) -> None:
        """Accept callers from now on, and send each of them `about`."""
        assert not self._started, "a port is opened once"
        self._about = about
        self._start()

    def data_address_of_previous(self) -> str:
        """The address where the previous stage's worker offers hidden states; "" while it has not joined."""
        with self._lock:
            peer = self._peers.get(PREVIOUS)
        return "" if peer is None else peer.data_address

    def report(self, data: bytes) -> None:
        """Send a frame to the engine master without blocking; drops it while no master has joined."""
        with self._lock:
            peer = self._peers.get(MASTER)
        if peer is None:
            return
        if len(data) > MAX_FRAME:
            peer.end(f"a frame to send has {len(data)} bytes; up to {MAX_FRAME} are allowed")
        elif not peer.outbox.put(data):
            peer.end(f"{len(peer.outbox)} frames wait to be sent, but the engine master reads none")

    def close(self) -> None:
        """End all streams and threads within a few seconds; drops unsent frames."""
        if not self._started:
            self._start()  # gRPC releases an address only after serving it
        stopped = self._server.stop(None)
        with self._lock:
            peers, readers = list(self._peers.values()), list(self._readers)
        for peer in peers:
            peer.end()
        stopped.wait(_STOP_SECONDS)
        for reader in readers:
            reader.join(_STOP_SECONDS)
        self._pool.shutdown(wait=False)

    def _start(self) -> None:
        self._started = True
        self._server.start()

    def _answer(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        about = self._about
        if about is None:
            _refuse(context, grpc.StatusCode.UNAVAILABLE, "this worker ended before it was ready")
        role, peer = self._admit(context)

        def over() -> None:
            peer.end()
            with self._lock:
                if self._peers.get(role) is peer:
                    del self._peers[role]

        if not context.add_callback(over):
            over()  # the call has already ended
            return
        reader = threading.Thread(
            target=self._read, args=(requests, peer), name=f"control port, from {role}", daemon=True
        )
        with self._lock:
            self._readers.add(reader)
        reader.start()
        context.send_initial_metadata(about_metadata(about))
        yield JOINED
        yield from peer.outbox
        if peer.why:
            _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, peer.why)

    def _adapter(self, messages: Iterator[bytes], context: Any) -> bytes:
        """Answer a call that brings an adapter."""
        self._check(context, (MASTER,))
        try:
            is_taken = self._take_adapter(*decode_pieces(messages))
        except BadFrame as error:
            _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not is_taken:
            _refuse(context, grpc.StatusCode.UNAVAILABLE, "this worker is not in that epoch")
        return b""

    def _check(self, context: Any, allowed: tuple[str, ...]) -> tuple[str, dict[str, str | bytes]]:
        """A caller's role and metadata; ends the call unless both are as they must be."""
        sent: dict[str, str | bytes] = dict(context.invocation_metadata())
        if not has_secret(sent, self._secret):
            why = "the control plane's secret is wrong; give the server and all workers the same"
            _refuse(context, grpc.StatusCode.UNAUTHENTICATED, why)
        if why := disagreement(sent, self._terms):
            _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, why)
        role = role_of(sent)
        if role not in allowed:
            why = f"role: this worker accepts {' or '.join(allowed)}, but the caller is {role[:100]!r}"
            _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, why)
        return role, sent

    def _admit(self, context: Any) -> tuple[str, _Peer]:
        """Accept the caller, or end its call with a status that says why not."""
        role, sent = self._check(context, (MASTER, PREVIOUS) if self._terms.stage else (MASTER,))
        data_address = data_address_of(sent) if role == PREVIOUS else ""
        if data_address is None:
            why = "the caller's data address is unreadable; run the same version of orca_jax everywhere"
            _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, why)
        peer = _Peer(self._frames, data_address)
        with self._lock:
            taken = role in self._peers
            if not taken:
                self._peers[role] = peer
        if taken:
            holder = "an engine master" if role == MASTER else "the previous stage's worker"
            why = f"{holder} has already joined this worker; stop it first"
            _refuse(context, grpc.StatusCode.ALREADY_EXISTS, why)
        return role, peer

    def _read(self, requests: Iterator[bytes], peer: _Peer) -> None:
        try:
            for data in requests:
                if not self._deliver(data):
                    peer.end("this worker's queue of received frames is full")
                    return
            peer.end()  # the caller has closed its side
        except grpc.RpcError:
            pass  # the stream broke; `over` runs
        finally:
            with self._lock:
                self._readers.discard(threading.current_thread())


def _refuse(context: Any, code: grpc.StatusCode, why: str) -> NoReturn:
    context.abort(code, why)
    raise AssertionError("abort raises")


def _is_in_use(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(path)
        except (BlockingIOError, TimeoutError):
            pass  # a process listens and has a full backlog
        except OSError:
            return False  # no socket, or one that a killed process left there
    return True
