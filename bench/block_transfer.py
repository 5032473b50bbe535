"""Bytes a second over loopback: our transfer of leased blocks, a plain socket, and gRPC streams.

    python -m bench.block_transfer [--bytes 1073741824] [--block 1048576] [--runs 3]

Each moves the same bytes from memory to memory of this process. The last line is JSON.
"""

import argparse
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import numpy as np

from orca_jax.engine.block_transfer import LeaseServer, SocketTransport
from orca_jax.request.kv_transfer import KVTransferParams, TransferFacts
from orca_jax.request.request import FinishReason, Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.leases import Leases

_FACTS = TransferFacts("bench", "")
_SECONDS = 60.0


class Blocks:
    """Blocks that are in memory."""

    def __init__(self, source: memoryview, size: int) -> None:
        self._source, self._size = source, size

    def settle(self) -> None:
        pass

    def parts(self, index: int) -> list[memoryview]:
        return [self._source[index * self._size : (index + 1) * self._size]]


class End:
    """The end of a fetch."""

    def __init__(self) -> None:
        self.come, self.ok = threading.Event(), False

    def said(self, token_id: int, proof: str) -> None:
        pass

    def arrived(self, n: int) -> None:
        pass

    def done(self, ok: bool) -> None:
        self.ok = ok
        self.come.set()


def leased(source: memoryview, into: memoryview, size: int) -> float:
    """The seconds of a transfer of leased blocks."""
    n = len(source) // size
    kv = KVManager(n_rows=1, max_blocks_per_row=n, n_blocks=n, block_size=1, prefix_caching=True)
    server, transport = LeaseServer("127.0.0.1", 0, _FACTS), SocketTransport(_FACTS)
    leases = Leases(
        kv,
        _FACTS,
        lambda _blocks, _state: Blocks(source, size),
        block_bytes=size,
        most_bytes=len(source),
        seconds=_SECONDS,
        engine_id="bench",
        address=("127.0.0.1", server.port),
    )
    server.start(leases)
    prompt = (0,) * n
    request = Request(
        request_id="bench",
        prompt_ids=prompt,
        max_tokens=n + 1,
        sampling=SamplingParams(max_tokens=1),
        seed=0,
        kv_transfer=KVTransferParams(do_remote_decode=True),
        row=0,
    )
    request.output_ids.append(0)
    leases.grant(request, FinishReason.LENGTH)
    assert request.kv_lease is not None
    end = End()
    places = [[into[i : i + size]] for i in range(0, len(source), size)]
    began = time.perf_counter()
    transport.fetch(request.kv_lease, _FACTS.digest(prompt, ()), 0, places, end, _SECONDS, _SECONDS)
    end.come.wait(_SECONDS)
    seconds = time.perf_counter() - began
    assert end.ok
    transport.close()
    server.close()
    return seconds


def plain(source: memoryview, into: memoryview, size: int) -> float:
    """The seconds of a plain socket, by `sendall` and `recv_into`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(source)

        thread = threading.Thread(target=serve)
        thread.start()
        with socket.create_connection(listener.getsockname()) as connection:
            began = time.perf_counter()
            n = 0
            while n < len(into):
                n += connection.recv_into(into[n:])
            seconds = time.perf_counter() - began
        thread.join()
    return seconds


def by_grpc(source: memoryview, into: memoryview, size: int) -> float:
    """The seconds of a stream of gRPC messages, one for each block."""

    def handle(_: bytes, __: object) -> Iterator[bytes]:
        for i in range(0, len(source), size):
            yield bytes(source[i : i + size])

    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server: Any = grpc.server(ThreadPoolExecutor(2), options=options)
    method = cast(Any, grpc.unary_stream_rpc_method_handler)(handle)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"Get": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        began = time.perf_counter()
        n = 0
        for message in cast(Any, channel.unary_stream("/bench/Get"))(b""):
            into[n : n + len(message)] = message
            n += len(message)
        seconds = time.perf_counter() - began
    server.stop(0).wait()
    assert n == len(source)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="bytes a second over loopback")
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--block", type=int, default=1 << 20)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    n = args.bytes // args.block * args.block
    source = np.random.default_rng(0).integers(0, 255, n, np.uint8)
    ways: dict[str, Callable[[memoryview, memoryview, int], float]] = {
        "leased blocks": leased,
        "plain socket": plain,
        "gRPC stream": by_grpc,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    into = np.zeros_like(source)
    for _ in range(args.runs):
        for name, way in ways.items():
            into[:] = 0
            rates[name].append(round(n / way(source.data, into.data, args.block) / 1e9, 2))
            assert np.array_equal(source, into), name
    for name, each in rates.items():
        print(f"{name}: {statistics.median(each)} GB/s ({min(each)} to {max(each)})")
    print(json.dumps({"benchmark": "block transfer", "gb_per_second": rates}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
