"""Traces: the requests of a measurement, made from a seed, the same for every engine that is measured.

Prompts are random token ids; an engine that plays a trace ignores ends of sequences, so that a request has
the output tokens that it is said to have.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request: its prompt's token ids, and how many tokens it generates."""

    prompt_ids: tuple[int, ...]
    n_output: int


Trace = tuple[TracedRequest, ...]


def paper_trace(n_requests: int, *, vocab_size: int, seed: int = 0) -> Trace:
    """Input lengths of U(32, 512) and output lengths of U(1, 128), bounds included (ORCA 6.2)."""
    rng = np.random.default_rng(seed)
    n_inputs = rng.integers(32, 513, n_requests)
    n_outputs = rng.integers(1, 129, n_requests)
    return _trace(rng, n_inputs.tolist(), n_outputs.tolist(), vocab_size)


def homogeneous_trace(
    n_requests: int, *, n_input: int, n_output: int, vocab_size: int, seed: int = 0
) -> Trace:
    """Requests of one size (ORCA 6.2, "homogeneous"); their prompts differ."""
    rng = np.random.default_rng(seed)
    return _trace(rng, [n_input] * n_requests, [n_output] * n_requests, vocab_size)


def n_output_tokens(trace: Trace) -> int:
    """What all requests generate together."""
    return sum(request.n_output for request in trace)


def _trace(rng: np.random.Generator, n_inputs: list[int], n_outputs: list[int], vocab_size: int) -> Trace:
    return tuple(
        TracedRequest(tuple(rng.integers(0, vocab_size, n_input).tolist()), n_output)
        for n_input, n_output in zip(n_inputs, n_outputs, strict=True)
    )
