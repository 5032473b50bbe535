"""The simulation's results as tables."""

from collections.abc import Sequence

from rich.table import Table

from bench.paper.serving_curve import throughput_at
from bench.simulate.figure_10 import Variant
from bench.simulate.figures import Served
from bench.simulate.load import peak
from bench.simulate.questions import Answer


def variant_table(title: str, variant: Variant) -> Table:
    """A row per system: its lowest load, its throughput at the latency, and its maximum."""
    made = Table(
        title=f"{title}: device times x {variant.slowness:.3g}; the engine alone "
        f"{variant.own * 1e3:.1f} ms a token"
    )
    for name in ("system", "alone, ms", f"req/s at {variant.latency * 1e3:.0f} ms", "most req/s"):
        made.add_column(name, justify="left" if name == "system" else "right")
    best = {winner[0] for kind in ("orca", "ft") if (winner := variant.best(kind)) is not None}
    for label, points in variant.curves.items():
        throughput = throughput_at(points, variant.latency)
        made.add_row(
            label + (" <" if label in best else ""),
            f"{points[0].normalized_median * 1e3:.1f}",
            "-" if throughput is None else f"{throughput:.3g}",
            f"{peak(points):.3g}",
        )
    return made


def answers_table(title: str, latency: float, answers: Sequence[Answer]) -> Table:
    """A row per case."""
    made = Table(title=title)
    columns = ("case", "system", f"req/s at {latency * 1e3:.0f} ms", "p99 there, ms", "batch", "most req/s")
    for i, name in enumerate(columns):
        made.add_column(name, justify="right" if i > 1 else "left")
    for one in answers:
        if one.problem is not None:
            made.add_row(one.name, one.system, "does not fit", "", "", "")
            continue
        p99 = None if one.p99 is None else one.p99 * 1e3
        cells = [_formatted(value) for value in (one.req_s, p99, one.mean_batch, one.peak_req_s)]
        made.add_row(one.name, one.system, *cells)
    return made


def served_table(title: str, served: Served) -> Table:
    """One run as a table."""
    made = Table(title=title)
    for name in ("requests", "req/s", "tokens/s", "median, ms", "p90", "p99", "batch", "iterations"):
        made.add_column(name, justify="right")
    times = (served.normalized_median, served.normalized_p90, served.normalized_p99)
    made.add_row(
        f"{served.n_requests:,}",
        f"{served.req_s:,.2f}",
        f"{served.tokens_s:,.0f}",
        *(f"{value * 1e3:.1f}" for value in times),
        f"{served.mean_batch:.1f}",
        f"{served.n_iterations:,}",
    )
    return made


def _formatted(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
