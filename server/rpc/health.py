"""The standard health service, grpc.health.v1.Health; it reports the gateway's phase."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthServicer

from server.gateway.gateway import Gateway, Phase
from server.rpc.calls import Context

_LOOK_SECONDS = 0.25
_Status = health_pb2.HealthCheckResponse


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
