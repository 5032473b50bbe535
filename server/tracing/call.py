"""The record of a client's request that is traced: its caller's headers, its choices, and its end."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orca_jax.request.request import Request
from orca_jax.scheduling.timeline import RequestRecord

_PARENT, _STATE = "traceparent", "tracestate"  # W3C Trace Context

AttributeValue = str | int | float | bool | list[str]


@dataclass(slots=True, eq=False)
class Choice:
    """One request in the service. `sampling` has the traced parameters, by OpenTelemetry's names.

    `record` is the timeline's, once the request has ended. Its times plus `epoch_ns` are nanoseconds since
    1970.
    """

    request_id: str
    sampling: Mapping[str, int | float]
    epoch_ns: int
    record: RequestRecord | None = None

    @classmethod
    def of(cls, request: Request, now: float) -> "Choice":
        """Make the choice of a request that arrives at `now`, in seconds of the timeline."""
        params = request.sampling
        sampling: dict[str, int | float] = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": request.seed,
        }
        for name in ("top_k", "frequency_penalty", "presence_penalty"):
            if value := getattr(params, name):
                sampling[name] = value
        return cls(request.request_id, sampling, time.time_ns() - _ns(now))

    def ns(self, at: float) -> int:
        """Convert a time of the timeline to nanoseconds since 1970."""
        return self.epoch_ns + _ns(at)


@dataclass(slots=True, eq=False)
class Call:
    """A client's request to either endpoint. Times are nanoseconds since 1970; `ended` is 0 until the end.

    `caller` has the headers that name the caller's span, and `attributes` are those of the request's span.
    `operation` is a name such as `chat`, and `error` the error's name if the request failed.
    """

    caller: Mapping[str, str]
    began: int
    ended: int = 0
    operation: str = "text_completion"
    error: str | None = None
    choices: list[Choice] = field(default_factory=list[Choice])
    attributes: dict[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])

    @classmethod
    def begin(cls, headers: Iterable[tuple[str, str]]) -> "Call":
        """Begin a call now. `headers` have lower-case names, and may be a gRPC call's metadata."""
        found: dict[str, list[str]] = {_PARENT: [], _STATE: []}
        for name, value in headers:
            if name in found:
                found[name].append(value)
        caller = dict[str, str]()
        if len(found[_PARENT]) == 1:  # more than one is ignored (W3C Trace Context, 3.2.2)
            caller = {_PARENT: found[_PARENT][0], _STATE: ",".join(found[_STATE])}
        return cls(caller, time.time_ns())

    @property
    def complete(self) -> bool:
        """True once the call and all its requests in the service have ended."""
        return self.ended > 0 and all(choice.record is not None for choice in self.choices)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
