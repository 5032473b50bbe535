"""Traces: the requests of a measurement, drawn from a seed or read from a file, the same for every engine.

Prompts are random token ids; an engine that plays a trace ignores end-of-sequence tokens, so that a request
has exactly the output tokens of the trace. Arrivals are a Poisson process (ORCA 6.2). Their random numbers
are drawn separately and only scaled by the rate, so that at every rate the same requests arrive in the same
order. trace_files.py reads public traces and recordings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

PAPER_INPUTS, PAPER_OUTPUTS = (32, 512), (1, 128)  # ORCA 6.2: uniform, bounds included
_ARRIVALS = 1  # the second stream of a seed


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request: its prompt's token ids, the number of tokens to generate, and its arrival.

    `arrival` is in seconds after the trace's start. The next turn of a conversation has the index of the turn
    before, which is smaller than its own, in `after`; its `arrival` is in seconds after that turn's answer,
    and its prompt is that turn's prompt, the answer, and `prompt_ids`. `owner` is the client that sent it, if
    the trace says so; policies that share between clients need it.
    """

    prompt_ids: tuple[int, ...]
    n_output: int
    arrival: float = 0.0
    after: int | None = None
    owner: str = ""


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


def scaled(trace: Trace, factor: float) -> Trace:
    """The same requests with their arrivals times `factor`; 0: all at once."""
    return tuple(replace(request, arrival=request.arrival * factor) for request in trace)


def shrunk(trace: Trace, factor: int) -> Trace:
    """Keep one in `factor` tokens, for small models; lengths are rounded up, and shared prefixes stay so."""
    if factor == 1:
        return trace
    return tuple(
        replace(request, prompt_ids=request.prompt_ids[::factor], n_output=-(-request.n_output // factor))
        for request in trace
    )


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
        TracedRequest(random_prompt(rng, n_input, vocab_size), n_output, arrival)
        for n_input, n_output, arrival in zip(n_inputs, n_outputs, arrivals, strict=True)
    )


def random_prompt(rng: np.random.Generator, n_input: int, vocab_size: int) -> tuple[int, ...]:
    """Draw a prompt's token ids, uniformly from the vocabulary."""
    return tuple(rng.integers(0, vocab_size, n_input).tolist())
