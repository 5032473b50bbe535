"""The figures of a run: throughput, latency percentiles with their spread, and goodput."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from server.load.client import Outcome
from server.load.player import Run

PERCENTILES = (50, 90, 99)
_Z = 1.96  # of 95 %


@dataclass(frozen=True, slots=True)
class Spread:
    """A percentile of n measured values in seconds, and its 95 % confidence interval.

    The interval is between two of the values, by the binomial distribution of how many lie below the
    percentile; nothing is assumed of their distribution. NaN without values.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Times:
    """A kind of latency in seconds, by percentile; `n` is how often it was measured."""

    n: int
    mean: float
    percentiles: Mapping[int, Spread]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one run. Rates are per second, from the first request to the last end.

    `first` is the time from sending a request to its first output; `per_token` the mean time between a
    request's tokens after the first; `between` the time between two events of a stream; `whole` the time from
    sending to the end; `normalized` that over the output's tokens (ORCA 6.2). Failed requests count in
    `n_failed` alone. `goodput` is the rate of requests that meet all objectives; None without any.
    """

    n_completed: int
    n_failed: int
    seconds: float
    requests_s: float
    input_tokens_s: float
    output_tokens_s: float
    n_input: int
    n_output: int
    n_cached: int
    first: Times
    per_token: Times
    between: Times
    whole: Times
    normalized: Times
    goodput: float | None
    client_us_per_token: float
    client_limit: str | None
    errors: Mapping[str, int]

    def record(self) -> dict[str, Any]:
        """For JSON, with null for what was not measured."""
        return _without_nan(asdict(self))


def figures(run: Run, objectives: Mapping[str, float]) -> Figures:
    """Compute the figures of a run; `objectives` are the most milliseconds of ttft, tpot and e2el."""
    done = [one for one in run.outcomes if one.error is None]
    errors = dict[str, int]()
    for one in run.outcomes:
        if one.error is not None:
            errors[one.error] = errors.get(one.error, 0) + 1
    start = min((one.sent for one in run.outcomes), default=0.0)
    seconds = max((one.ended for one in done), default=start) - start
    n_output = sum(one.n_output for one in done)

    def rate(n: float) -> float:
        return n / seconds if seconds > 0 else 0.0

    good = sum(_is_good(one, objectives) for one in done)
    return Figures(
        n_completed=len(done),
        n_failed=len(run.outcomes) - len(done),
        seconds=seconds,
        requests_s=rate(len(done)),
        input_tokens_s=rate(sum(one.n_input for one in done)),
        output_tokens_s=rate(n_output),
        n_input=sum(one.n_input for one in done),
        n_output=n_output,
        n_cached=sum(one.n_cached for one in done),
        first=times([_first(one) for one in done]),
        per_token=times([_per_token(one) for one in done if one.n_output > 1]),
        between=times([gap for one in done for gap in np.diff(np.asarray(one.times)).tolist()]),
        whole=times([one.ended - one.sent for one in done]),
        normalized=times([(one.ended - one.sent) / one.n_output for one in done if one.n_output]),
        goodput=rate(good) if objectives else None,
        client_us_per_token=run.cpu * 1e6 / n_output if n_output else math.nan,
        client_limit=run.limit,
        errors=errors,
    )


def times(values: Sequence[float]) -> Times:
    """Mean and percentiles of values in seconds; NaN among them is left out."""
    known = np.sort(np.asarray([value for value in values if not math.isnan(value)]))
    mean = float(known.mean()) if known.size else math.nan
    return Times(known.size, mean, {each: spread(known, each / 100) for each in PERCENTILES})


def spread(ascending: np.ndarray, share: float) -> Spread:
    """The quantile of ascending values and its 95 % confidence interval."""
    n = ascending.size
    if not n:
        return Spread(math.nan, math.nan, math.nan)
    width = _Z * math.sqrt(n * share * (1 - share))
    low = max(0, math.floor(n * share - width))
    high = min(n - 1, math.ceil(n * share + width))
    value = float(np.quantile(ascending, share))
    return Spread(value, min(value, float(ascending[low])), max(value, float(ascending[high])))


def _first(one: Outcome) -> float:
    return one.times[0] - one.sent if one.times else math.nan


def _per_token(one: Outcome) -> float:
    return (one.times[-1] - one.times[0]) / (one.n_output - 1) if one.times else math.nan


def _is_good(one: Outcome, objectives: Mapping[str, float]) -> bool:
    measured = {
        "ttft": _first(one),
        "tpot": _per_token(one) if one.n_output > 1 else 0.0,
        "e2el": one.ended - one.sent,
    }
    return all(measured[name] * 1e3 <= most for name, most in objectives.items())


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
