"""A call's deadline, as precisely as the server can know it."""

from typing import Any

import grpc

_SHARE = 0.02
_SECONDS = 0.05


class Deadline:
    """The deadline of a call. `seconds` is the time left at construction, None without a deadline."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self.seconds = _time_remaining(context)

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed or is about to.

        The client measures its deadline itself and hangs up when it passes. The server's copy is later by the
        transmission time and by up to a hundredth, because gRPC rounds the timeout up when it sends it.
        """
        left = _time_remaining(self._context)
        return left is not None and self.seconds is not None and left <= _SECONDS + _SHARE * self.seconds


def _time_remaining(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    return context.time_remaining()  # None without a deadline, whatever its annotation says
