"""A client's request while it is traced: its caller's headers, its choices, and how it ended."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orca_jax.request.request import Request
from orca_jax.scheduling.timeline import RequestRecord

_PARENT, _STATE = "traceparent", "tracestate"  # W3C Trace Context

AttributeValue = str | int | float | bool | list[str]


@dataclass(slots=True, eq=False)
class Choice:
    """One request in the service. `sampling` has what is traced of its parameters, by its name there.

    `record` is the timeline's once the request has ended. Its times plus `epoch_ns` are in ns since 1970.
    """

    request_id: str
    sampling: Mapping[str, int | float]
    epoch_ns: int
    record: RequestRecord | None = None

    @classmethod
    def of(cls, request: Request, now: float) -> "Choice":
        """For a request that arrives at `now`, in seconds of the timeline."""
        params = request.sampling
        sampling: dict[str, int | float] = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": request.seed,
        }
        if params.top_k:
            sampling["top_k"] = params.top_k
        if params.frequency_penalty:
            sampling["frequency_penalty"] = params.frequency_penalty
        if params.presence_penalty:
            sampling["presence_penalty"] = params.presence_penalty
        return cls(request.request_id, sampling, time.time_ns() - _ns(now))

    def ns(self, at: float) -> int:
        """A time of the timeline in ns since 1970."""
        return self.epoch_ns + _ns(at)


@dataclass(slots=True, eq=False)
class Call:
    """One request of a client, over either endpoint. Times are in ns since 1970; `ended` is 0 before its end.

    `caller` has the headers that name the caller's span; `attributes` are those of the request's own span. It
    has the operation's name, such as `chat`, and the error's if it failed.
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
        """A call that begins now. `headers` have lower-case names, and may be a gRPC call's metadata."""
        found: dict[str, list[str]] = {_PARENT: [], _STATE: []}
        for name, value in headers:
            if name in found:
                found[name].append(value)
        caller = dict[str, str]()
        if len(found[_PARENT]) == 1:  # several name no parent (W3C Trace Context, 3.2.2)
            caller = {_PARENT: found[_PARENT][0], _STATE: ",".join(found[_STATE])}
        return cls(caller, time.time_ns())

    @property
    def complete(self) -> bool:
        """Whether the call and all its requests in the service have ended."""
        return self.ended > 0 and all(choice.record is not None for choice in self.choices)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
