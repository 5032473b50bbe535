"""The gRPC endpoint: orca.v1.Generation with health and reflection on one port, over TLS where asked for."""

from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from orca_jax.errors import ConfigError
from server.gateway.gateway import Gateway
from server.metrics.metrics import Metrics
from server.process.addresses import bound_socket, in_url
from server.rpc.call_limits import CallLimits
from server.rpc.calls import Calls, KeyCheck
from server.rpc.generation import SERVICE, Generation
from server.rpc.health import Health
from server.settings.api_keys import ApiKeys
from server.settings.config import EndpointOptions

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

# Times in milliseconds. A client that vanished without a word is found within a minute, and one that asks
# every ten seconds whether we are alive is no nuisance. A port is ours alone: two servers on one would each
# get a part of the calls.
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 40_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # or a ping has a minute, whatever the line above says
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_connection_idle_ms", 300_000),  # without a call; a client connects again by itself
    ("grpc.max_concurrent_streams", 1024),  # of one connection; the client lets more calls wait
)


class RpcServer:
    """A server on one event loop: `bind`, `start`, and `stop` at the end. Made by `create_server`."""

    def __init__(self, server: grpc.aio.Server, health: Health, options: EndpointOptions) -> None:
        self._server = server
        self._health = health
        self._options = options

    async def bind(self, host: str, port: int) -> int:
        """Take the address and return the port, a free one for 0; call it once, before `start`.

        Raises ConfigError where the address is taken or not ours, or certificate and key cannot be used.
        """
        with bound_socket(host, port, flag="--grpc-port") as probe:  # the system says why, gRPC only says no
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
        """Answer calls from now on."""
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        """Take no more calls; those that run get `grace` seconds, and end as cancelled then."""
        self._health.close()
        await self._server.stop(grace)

    def _credentials(self) -> grpc.ServerCredentials | None:
        certificate, key = self._options.ssl_certfile, self._options.ssl_keyfile
        if certificate is None or key is None:
            return None
        return grpc.ssl_server_credentials([(_read(key), _read(certificate))])


def create_server(
    gateway: Gateway, options: EndpointOptions, *, api_keys: ApiKeys, metrics: Metrics
) -> RpcServer:
    """A server in front of `gateway`; made on the loop that runs it.

    As many calls may be open as connections: the pool's queue bounds those that are accepted far below that,
    and one that is not ends at once.
    """
    calls = Calls(gateway, api_keys=api_keys, access_log=options.access_log, metrics=metrics)
    server = grpc.aio.server(
        interceptors=[
            KeyCheck(SERVICE, api_keys, calls),
            CallLimits(SERVICE, message_seconds=options.body_timeout, max_streams=options.max_watch_streams),
        ],
        options=[*_OPTIONS, *_limits(options)],
        maximum_concurrent_rpcs=options.max_connections,
    )
    generation = Generation(
        gateway, calls, request_timeout=options.request_timeout, max_choices=options.max_choices
    )
    generation.add_to(server)
    health = Health(gateway, (SERVICE,))
    add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, _HEALTH, reflection.SERVICE_NAME), server)
    return RpcServer(server, health, options)


def _limits(options: EndpointOptions) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", options.max_body_bytes),
        ("grpc.max_allowed_incoming_connections", options.max_connections),
        ("grpc.server_handshake_timeout_ms", max(round(1000 * options.header_timeout), 1)),
        # Soft and hard: between the two gRPC would refuse by chance.
        ("grpc.max_metadata_size", options.max_header_bytes),
        ("grpc.absolute_max_metadata_size", options.max_header_bytes),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
