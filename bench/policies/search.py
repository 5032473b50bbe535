"""The highest load at which a latency stays within a bound."""

from collections.abc import Callable

from bench.policies.figures import Figures

STEP = 1.5
HALVINGS = 4  # share of the step, so the rate is exact to 2.6%
_FAR = 100.0  # the search ends at this multiple or fraction of the first rate


def highest_rate(
    play_at: Callable[[float], Figures], bound: float, start: float
) -> tuple[float, Figures] | None:
    """The rate and its figures; None if even a hundredth of `start` is too much."""
    best: tuple[float, Figures] | None = None

    def fits(rate: float) -> bool:
        nonlocal best
        figures = play_at(rate)
        if figures.normalized_p50 > bound:
            return False
        best = rate, figures
        return True

    highest(fits, start, step=STEP, halvings=HALVINGS)
    return best


def highest(meets: Callable[[float], bool], start: float, *, step: float = 1.4, halvings: int = 5) -> float:
    """The highest rate found that `meets` its limits; 0 if even a hundredth of `start` does not."""
    low = high = 0.0
    rate = start
    while not (low and high):
        if not start / _FAR <= rate <= start * _FAR:
            return low
        if meets(rate):
            low, rate = rate, rate * step
        else:
            high, rate = rate, rate / step
    for _ in range(halvings):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low
