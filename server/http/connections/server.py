"""The HTTP server: uvicorn's, with our own listener and connection limits."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp

from server.http.connections.connection import Connection
from server.http.connections.listener import Listener, OpenConnections, Place, Turns
from server.settings.endpoint_options import EndpointOptions


class HttpServer(uvicorn.Server):
    """Serves one application on one bound socket. Construct it on the event loop that runs it.

    It installs no signal handlers: the server handles signals once, for both endpoints. `refused` is called
    with the status of each response that is sent without the application.
    """

    def __init__(
        self, app: ASGIApp, options: EndpointOptions, *, stop_seconds: int, refused: Callable[[int], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=stop_seconds,
                ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile,
            )
        )
        self._options = options
        self._refused = refused
        self._connections = OpenConnections(
            most=options.max_connections, most_per_address=options.max_connections_per_address
        )
        self._turns = Turns(asyncio.get_running_loop())
        self._listener: Listener | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start our own listener, where uvicorn would let asyncio accept connections."""
        assert sockets is not None and len(sockets) == 1
        await self.lifespan.startup()
        self.servers = []
        self._listener = Listener(
            sockets[0],
            self._protocol,
            self._connections,
            self._turns,
            tls=self.config.ssl,
            handshake_timeout=self._options.header_timeout,
            refused=self._refused,
        )
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and wait for running requests."""
        if self._listener is not None:
            self._listener.close()
        await super().shutdown(sockets)

    def _protocol(self, place: Place) -> asyncio.Protocol:
        return Connection(
            self.config,
            self.server_state,
            self.lifespan.state,
            options=self._options,
            place=place,
            turns=self._turns,
            refused=self._refused,
        )
