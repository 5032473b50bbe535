"""A call's deadline, as far as a server can know it."""

from typing import Any

import grpc

_SHARE = 0.02
_SECONDS = 0.05


class Deadline:
    """The deadline of a call that has just come; `seconds` is the time left then, None without a deadline."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self.seconds = _time_remaining(context)

    @property
    def passed(self) -> bool:
        """Is it there, or as good as there?

        A client counts it for itself and hangs up when it is there. The server's copy is up to a hundredth
        later, because gRPC rounds a time limit up on its way, and by the time on the way.
        """
        left = _time_remaining(self._context)
        return left is not None and self.seconds is not None and left <= _SECONDS + _SHARE * self.seconds


def _time_remaining(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    return context.time_remaining()  # None without a deadline, whatever its annotation says
