"""The event loop's processor time for a short request, without sockets and without other processes.

    python -m bench.server.intake [--requests 150] [--rounds 8]

The requests of bench.server.delivery go one after another from a connection's parser through the real
endpoint, gateway and scheduler, over a device that answers at once; the answer's bytes are dropped. Only the
time of the loop's thread counts, and the least of the rounds is shown, so that two commits can be compared on
a machine that does other work too, one after the other and more than once.
"""

import argparse
import asyncio
import json
import platform
import time
from collections.abc import Sequence
from typing import Any

import uvicorn
import uvloop
from uvicorn.server import ServerState

from bench.server.costless_server import HOST, Device, served_model
from bench.server.delivery import REQUESTS
from server.gateway.gateway import Gateway
from server.http.app import create_app
from server.http.connections.connection import Connection
from server.http.connections.listener import OpenConnections, Turns
from server.metrics.metrics import Metrics
from server.process.watchdog import settle
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions


class _Transport(asyncio.Transport):
    """A transport that drops what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": (HOST, 1), "sockname": (HOST, 2)}.get(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.n_bytes += len(data)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """A request as a client sends it."""
    text = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


async def _answered(connection: Connection, request: bytes) -> None:
    """Send a request, and wait for the end of its response."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    connection.data_received(request)
    cycle = connection.cycle
    on_response = cycle.on_response

    def end() -> None:
        on_response()
        ended.set_result(None)

    cycle.on_response = end
    await ended


async def measure(n_requests: int, n_rounds: int) -> dict[str, list[float]]:
    """Microseconds of the loop's thread per request, of each kind and round."""
    model = served_model(Device(0.0, 32))
    gateway = Gateway(request_timeout=600.0)
    metrics = Metrics(gateway)
    options = EndpointOptions(host=HOST, port=0, grpc_port=0, access_log="off")
    app = create_app(gateway, options, api_keys=ApiKeys.read(None, {}), metrics=metrics)
    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None)
    config.load()
    turns, connections = Turns(asyncio.get_running_loop()), OpenConnections(most=8, most_per_address=8)
    taken: dict[str, list[float]] = {}
    with model.orca:
        metrics.attach(model)
        gateway.open(model)
        settle()
        for kind, (path, body) in REQUESTS.items():
            connection = Connection(
                config,
                ServerState(),
                {},
                options=options,
                place=connections.take(HOST),
                turns=turns,
                refused=lambda status: None,
            )
            connection.connection_made(_Transport())
            request = request_bytes(path, body)
            for _ in range(n_rounds):
                before = time.thread_time()
                for _ in range(n_requests):
                    await _answered(connection, request)
                taken.setdefault(kind, []).append((time.thread_time() - before) / n_requests * 1e6)
            connection.connection_lost(None)
    return taken


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print JSON as the last line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.server.intake", description="The event loop's time for a short request"
    )
    parser.add_argument("--requests", type=int, default=150, help="of a round (default: 150)")
    parser.add_argument("--rounds", type=int, default=8, help="of each kind (default: 8)")
    flags = parser.parse_args(arguments)
    taken = uvloop.run(measure(flags.requests, flags.rounds))
    for kind, each in taken.items():
        print(f"{kind}: {min(each):.0f} us on the event loop ({len(each)} rounds, the most {max(each):.0f})")
    least = {kind: round(min(each), 1) for kind, each in taken.items()}
    print(json.dumps({"benchmark": "intake", "python": platform.python_version(), "least_us": least}))


if __name__ == "__main__":
    main()
