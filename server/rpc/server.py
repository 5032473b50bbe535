"""The gRPC endpoint: orca.v1.Generation, health and reflection on one port, optionally over TLS."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from orca_jax.errors import ConfigError
from server.gateway.gateway import Gateway, Phase
from server.metrics.metrics import Metrics
from server.process.addresses import bound_socket, in_url
from server.rpc.calls import CallLimits, Calls, Context, KeyCheck
from server.rpc.generation import SERVICE, Generation
from server.settings.api_keys import ApiKeys
from server.settings.endpoint_options import EndpointOptions
from server.tracing.tracing import Tracing

_LOOK_SECONDS = 0.25
_Status = health_pb2.HealthCheckResponse
_Statuses: Any = health_pb2.HealthListResponse  # pyright: ignore[reportAttributeAccessIssue]


class Health(HealthServicer):
    """SERVING while the gateway is ready, for each of `services` and for the whole server ("").

    NOT_SERVING at any other time, for example while lost workers restart.
    """

    def __init__(self, gateway: Gateway, services: tuple[str, ...]) -> None:
        self._gateway = gateway
        self._known = {"", *services}
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End all calls of `Watch`, because the server is about to stop."""
        self._closing.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> _Status:
        """The current status; NOT_FOUND for an unknown service."""
        if request.service not in self._known:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return _Status(status=self._status(request.service))

    async def List(self, request: object, context: Context) -> Any:
        """The current status of each service."""
        return _Statuses(statuses={one: _Status(status=self._status(one)) for one in sorted(self._known)})

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The current status, and each change within a quarter of a second, until the server stops."""
        sent = None
        while not self._closing.is_set():
            status = self._status(request.service)
            if status != sent:
                await context.write(_Status(status=status))
                sent = status
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._closing.wait()
            except TimeoutError:
                pass
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in self._known:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._gateway.phase is Phase.READY else _Status.NOT_SERVING


_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

# Times in milliseconds. A client that vanishes without closing its connection is detected within a minute,
# and clients may send keepalive pings every ten seconds. The port is exclusive: two servers on one port would
# each get a part of the calls.
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 40_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # without this a ping has a minute, whatever the line above
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_connection_idle_ms", 300_000),  # without a call; clients reconnect automatically
    ("grpc.max_concurrent_streams", 1024),  # per connection; clients queue further calls
)


class RpcServer:
    """A gRPC server on one event loop, made by `create_server`. Call `bind`, `start`, and finally `stop`."""

    def __init__(self, server: grpc.aio.Server, health: Health, options: EndpointOptions) -> None:
        self._server = server
        self._health = health
        self._options = options

    async def bind(self, host: str, port: int) -> int:
        """Bind the address and return the port: a free one if `port` is 0. Call it once, before `start`.

        Raises ConfigError if the address is in use or not on this machine, or if the certificate or key is
        unusable.
        """
        # Bind once here, because gRPC's own error does not give the reason.
        with bound_socket(host, port, flag="--grpc-port") as probe:
            address = f"{in_url(probe.getsockname()[0])}:{port}"
        try:
            credentials = self._credentials()
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            message = f"cannot listen on {address} for gRPC: {error}; choose another --grpc-port or --host"
            raise ConfigError(message) from error

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        """Reject new calls; give running calls `grace` seconds, then cancel them."""
        self._health.close()
        await self._server.stop(grace)

    def _credentials(self) -> grpc.ServerCredentials | None:
        certificate, key = self._options.ssl_certfile, self._options.ssl_keyfile
        if certificate is None or key is None:
            return None
        return grpc.ssl_server_credentials([(_read(key), _read(certificate))])


def create_server(
    gateway: Gateway,
    options: EndpointOptions,
    *,
    api_keys: ApiKeys,
    metrics: Metrics,
    tracing: Tracing | None = None,
) -> RpcServer:
    """A server for `gateway`. Call it on the event loop that will run the server.

    The limit on open calls equals the limit on connections. The request pool's queue allows far fewer
    accepted requests, and a call that is not accepted ends at once.
    """
    calls = Calls(gateway, api_keys=api_keys, access_log=options.access_log, metrics=metrics, tracing=tracing)
    server = grpc.aio.server(
        interceptors=[
            KeyCheck(SERVICE, api_keys, calls),
            CallLimits(SERVICE, message_seconds=options.body_timeout, max_streams=options.max_watch_streams),
        ],
        options=[*_OPTIONS, *_limits(options)],
        maximum_concurrent_rpcs=options.max_connections,
    )
    Generation(gateway, calls, options).add_to(server)
    health = Health(gateway, (SERVICE,))
    add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, _HEALTH, reflection.SERVICE_NAME), server)
    return RpcServer(server, health, options)


def _limits(options: EndpointOptions) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", options.max_body_bytes),
        ("grpc.max_allowed_incoming_connections", options.max_connections),
        ("grpc.server_handshake_timeout_ms", max(round(1000 * options.header_timeout), 1)),
        # The soft and the hard limit are equal: between the two, gRPC would reject calls at random.
        ("grpc.max_metadata_size", options.max_header_bytes),
        ("grpc.absolute_max_metadata_size", options.max_header_bytes),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
