"""ServeGen's clients (Xiang et al., NSDI 2026): requests drawn from the rates and lengths of real clients.

A directory has two files for each client. `chunk-N-trace.csv` has for each window of ten minutes its start,
the requests a second, their coefficient of variation, and the distribution of the times between them: Gamma
or Weibull, with shape and scale. `chunk-N-dataset.json` has the probability of each number of input and of
output tokens, by the start of periods of hours.

Drawing is ServeGen's own: in a window of rate r come ceil(600 r) requests, whose times are scaled to fill it,
and one random number picks both lengths of a request. The first window is the first in which anyone sends.
"""

import ast
import csv
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from server.errors import TraceError
from server.load.drawn_prompts import Draw
from server.load.trace import TracedRequest

WINDOW = 600.0  # seconds


class _Window(NamedTuple):
    rate: float
    pattern: str
    shape: float
    scale: float


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Cumulative probabilities of the lengths 0, 1, 2, ... of inputs and of outputs."""

    n_input: npt.NDArray[np.float64]
    n_output: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Client:
    number: int
    windows: Mapping[int, _Window]
    periods: list[int]  # their starts, ascending
    lengths: list[_Lengths]


def is_servegen(folder: Path) -> bool:
    """Whether a directory has ServeGen's clients."""
    return any(folder.glob("chunk-*-trace.csv"))


def servegen_requests(folder: Path, draw: Draw) -> Iterator[TracedRequest]:
    """Draw the requests of all clients, window by window. Raises TraceError."""
    clients = [_client(path) for path in sorted(folder.glob("chunk-*-trace.csv"), key=_number)]
    first: float | None = None
    for start in sorted({start for client in clients for start in client.windows}):
        drawn = [one for client in clients for one in _window(client, start, draw)]
        for at, n_input, n_output, number in sorted(drawn):
            first = at if first is None else first
            yield TracedRequest(draw.prompt(n_input), n_output, at - first, owner=f"client {number}")


def _window(client: _Client, start: int, draw: Draw) -> Iterator[tuple[float, int, int, int]]:
    """Times, input and output tokens of a client's requests in a window, and its number."""
    window = client.windows.get(start)
    if window is None:
        return
    rng = np.random.default_rng([draw.seed, client.number, start])
    n = math.ceil(window.rate * WINDOW)
    gamma = window.pattern == "Gamma"
    gaps = window.scale * (rng.gamma(window.shape, size=n) if gamma else rng.weibull(window.shape, n))
    times = start + np.cumsum(gaps) * (WINDOW / gaps.sum())
    times = times[times < start + WINDOW]
    lengths = client.lengths[max(0, bisect_right(client.periods, start) - 1)]
    picked = rng.random(len(times))
    n_inputs = np.searchsorted(lengths.n_input, picked).clip(1, len(lengths.n_input) - 1)
    n_outputs = np.searchsorted(lengths.n_output, picked).clip(1, len(lengths.n_output) - 1)
    for at, n_input, n_output in zip(times.tolist(), n_inputs.tolist(), n_outputs.tolist(), strict=True):
        yield at, n_input, n_output, client.number


def _client(path: Path) -> _Client:
    windows: dict[int, _Window] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row, (start, rate, _, pattern, shape, scale) in enumerate(csv.reader(file), 1):
                if float(rate) > 0:
                    if pattern not in ("Gamma", "Weibull"):
                        raise TraceError(
                            f"{path}, line {row}: pattern is {pattern!r}; it must be Gamma or Weibull"
                        )
                    windows[int(start)] = _Window(float(rate), pattern, float(shape), float(scale))
    except ValueError as error:
        raise TraceError(f"{path} is no client of ServeGen: {error}") from error
    dataset = path.with_name(path.name.replace("-trace.csv", "-dataset.json"))
    try:
        fields: dict[str, Any] = json.loads(dataset.read_text(encoding="utf-8"))
        known = {int(start): _lengths(one) for start, one in fields.items() if one["input_tokens"] != "{}"}
    except (ValueError, SyntaxError, LookupError, TypeError, AttributeError) as error:
        raise TraceError(f"{dataset} is no client of ServeGen: {error!r}") from error
    if windows and not known:
        raise TraceError(f"{dataset} has no lengths, and {path.name} has requests")
    periods = sorted(known)
    return _Client(_number(path), windows, periods, [known[start] for start in periods])


def _lengths(fields: Mapping[str, str]) -> _Lengths:
    return _Lengths(_cumulative(fields["input_tokens"]), _cumulative(fields["output_tokens"]))


def _cumulative(text: str) -> npt.NDArray[np.float64]:
    """Cumulative probabilities of "{length: probability, ...}"."""
    shares: dict[int, float] = ast.literal_eval(text)
    dense = np.zeros(max(shares) + 1)
    dense[list(shares)] = list(shares.values())
    return np.cumsum(dense)


def _number(path: Path) -> int:
    return int(path.name.split("-")[1])
