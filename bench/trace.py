"""Traces: the requests of a measurement, generated from a seed, the same for every engine.

Prompts are random token ids; an engine that plays a trace ignores end-of-sequence tokens, so that a request
has exactly the output tokens of the trace. Arrivals are a Poisson process (ORCA 6.2). Their random numbers
are drawn separately and only scaled by the rate, so that at every rate the same requests arrive in the same
order.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

PAPER_INPUTS, PAPER_OUTPUTS = (32, 512), (1, 128)  # ORCA 6.2: uniform, bounds included
_FIELDS = {"arrival", "n_input", "prompt_ids", "n_output", "after"}
_ARRIVALS = 1  # the second stream of a seed


class TraceError(ValueError):
    """A file is not a valid trace; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request: its prompt's token ids, the number of tokens to generate, and its arrival.

    `arrival` is in seconds after the trace's start. The next turn of a conversation has the index of the turn
    before, which is smaller than its own, in `after`; its `arrival` is in seconds after that turn's answer,
    and its prompt is that turn's prompt, the answer, and `prompt_ids`.
    """

    prompt_ids: tuple[int, ...]
    n_output: int
    arrival: float = 0.0
    after: int | None = None


Trace = tuple[TracedRequest, ...]  # in the order of arrival, or conversation by conversation


def paper_trace(n_requests: int, *, vocab_size: int, seed: int = 0, rate: float | None = None) -> Trace:
    """Input lengths of U(32, 512) and output lengths of U(1, 128), bounds included (ORCA 6.2).

    `rate` is in requests per second; without it all requests arrive at the start.
    """
    return uniform_trace(
        n_requests,
        n_input=PAPER_INPUTS,
        n_output=PAPER_OUTPUTS,
        vocab_size=vocab_size,
        seed=seed,
        rate=rate,
    )


def uniform_trace(
    n_requests: int,
    *,
    n_input: tuple[int, int],
    n_output: tuple[int, int],
    vocab_size: int,
    seed: int = 0,
    rate: float | None = None,
) -> Trace:
    """Uniformly distributed input and output lengths with these bounds, both included."""
    rng = np.random.default_rng(seed)
    n_inputs = rng.integers(n_input[0], n_input[1] + 1, n_requests)
    n_outputs = rng.integers(n_output[0], n_output[1] + 1, n_requests)
    arrivals = _arrivals(n_requests, seed, rate)
    return _trace(rng, n_inputs.tolist(), n_outputs.tolist(), arrivals, vocab_size)


def homogeneous_trace(
    n_requests: int,
    *,
    n_input: int,
    n_output: int,
    vocab_size: int,
    seed: int = 0,
    rate: float | None = None,
) -> Trace:
    """Requests of one size (ORCA 6.2, "homogeneous"); their prompts differ."""
    rng = np.random.default_rng(seed)
    arrivals = _arrivals(n_requests, seed, rate)
    return _trace(rng, [n_input] * n_requests, [n_output] * n_requests, arrivals, vocab_size)


def read_trace(path: Path, *, vocab_size: int, seed: int = 0) -> Trace:
    """Read recorded arrivals: a line of JSON per request, in order of arrival.

    {"arrival": seconds, "n_input": tokens, "n_output": tokens}, with a random prompt, or with
    "prompt_ids": [...] instead of "n_input". The next turn of a conversation has "after", the number of the
    turn before (0 is the file's first request), and the other fields as in TracedRequest.

    Raises TraceError, and OSError for a file that cannot be read.
    """
    rng = np.random.default_rng(seed)
    requests: list[TracedRequest] = []
    last = 0.0
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(line, rng, vocab_size, len(requests))
            if request.after is None:
                if request.arrival < last:
                    message = (
                        f"is {request.arrival:g}, before that of the request above; sort the lines by it"
                    )
                    raise _FieldError("arrival", message)
                last = request.arrival
        except _FieldError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        requests.append(request)
    if not requests:
        raise TraceError(f"{path} has no request; it needs a line of JSON for each")
    return tuple(requests)


def scaled(trace: Trace, factor: float) -> Trace:
    """The same requests with their arrivals times `factor`; 0: all at once."""
    return tuple(replace(request, arrival=request.arrival * factor) for request in trace)


def mean_rate(trace: Trace) -> float:
    """Requests per second from the first arrival to the last; infinity if all arrive at once."""
    seconds = trace[-1].arrival - trace[0].arrival
    return (len(trace) - 1) / seconds if seconds > 0 else math.inf


def mean_lengths(trace: Trace) -> tuple[int, int]:
    """Mean input and output tokens of a request, rounded."""
    n_input = sum(input_lengths(trace)) / len(trace)
    return round(n_input), round(n_output_tokens(trace) / len(trace))


def input_lengths(trace: Trace) -> list[int]:
    """The tokens of each request's prompt, with the turns before."""
    lengths: list[int] = []
    for request in trace:
        before = 0 if request.after is None else lengths[request.after] + trace[request.after].n_output
        lengths.append(before + len(request.prompt_ids))
    return lengths


def n_output_tokens(trace: Trace) -> int:
    """The sum of all requests' output tokens."""
    return sum(request.n_output for request in trace)


def _arrivals(n_requests: int, seed: int, rate: float | None) -> list[float]:
    """The arrival times of a Poisson process of `rate` requests per second."""
    if rate is None:
        return [0.0] * n_requests
    if not 0 < rate < math.inf:
        raise ValueError(f"rate is {rate}; it must be a number of requests a second above 0")
    gaps = np.random.default_rng([seed, _ARRIVALS]).exponential(size=n_requests)
    return (np.cumsum(gaps) / rate).tolist()


def _trace(
    rng: np.random.Generator,
    n_inputs: Sequence[int],
    n_outputs: Sequence[int],
    arrivals: Sequence[float],
    vocab_size: int,
) -> Trace:
    return tuple(
        TracedRequest(_prompt(rng, n_input, vocab_size), n_output, arrival)
        for n_input, n_output, arrival in zip(n_inputs, n_outputs, arrivals, strict=True)
    )


def _prompt(rng: np.random.Generator, n_input: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, vocab_size, n_input).tolist())


class _FieldError(Exception):
    """An invalid field of a line; the message says why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")


def _request(line: str, rng: np.random.Generator, vocab_size: int, n_before: int) -> TracedRequest:
    """Parse one line of a recorded trace, after `n_before` requests. Raises _FieldError."""
    try:
        fields: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise _FieldError("the line", f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _FieldError("the line", "is not a JSON object")
    for field in fields:
        if field not in _FIELDS:
            raise _FieldError(repr(field), f"is not known; there are {', '.join(sorted(_FIELDS))}")
    arrival = fields.get("arrival")
    if not isinstance(arrival, int | float) or isinstance(arrival, bool) or not 0 <= arrival < math.inf:
        raise _FieldError("arrival", f"is {arrival!r}; it must be seconds, 0 or more")
    n_output = _count(fields, "n_output")
    if ("n_input" in fields) == ("prompt_ids" in fields):
        raise _FieldError("n_input", "or prompt_ids must be there, and one of them alone")
    if "n_input" in fields:
        prompt_ids = _prompt(rng, _count(fields, "n_input"), vocab_size)
    else:
        prompt_ids = _prompt_ids(fields["prompt_ids"], vocab_size)
    return TracedRequest(prompt_ids, n_output, float(arrival), _after(fields, n_before))


def _after(fields: dict[str, Any], n_before: int) -> int | None:
    value = fields.get("after")
    if value is not None and (
        not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < n_before
    ):
        raise _FieldError(
            "after", f"is {value!r}; it must be the number of a request above, 0 to {n_before - 1}"
        )
    return value


def _count(fields: dict[str, Any], field: str) -> int:
    value = fields.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _FieldError(field, f"is {value!r}; it must be a number of tokens, 1 or more")
    return value


def _prompt_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    ids: list[Any] = value if isinstance(value, list) else []
    if not ids or any(not isinstance(one, int) or isinstance(one, bool) for one in ids):
        raise _FieldError("prompt_ids", "must be a list of token ids, with one at least")
    for one in ids:
        if not 0 <= one < vocab_size:
            raise _FieldError("prompt_ids", f"has {one}; the vocabulary has 0 to {vocab_size - 1}")
    return tuple(ids)
