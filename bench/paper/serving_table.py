"""Formats systems under load as tables, and as points for the line of JSON."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from bench.paper.serving_load import Honesty, Playing


def figures_table(playings: Sequence[Playing]) -> Table:
    """Throughput and latency of every play, by rate."""
    made = Table(title="normalized latency in milliseconds a generated token")
    rows = [
        [
            f"{one.figures.req_s:.3g}",
            f"{one.figures.tokens_s:.1f}",
            f"{one.figures.normalized_median * 1e3:.1f}",
            f"{one.figures.normalized_p90 * 1e3:.1f}",
            f"{one.figures.normalized_p99 * 1e3:.1f}",
            f"{one.figures.latency_median:.2f}",
        ]
        for one in playings
    ]
    columns = ("finished/s", "tokens/s", "median", "p90", "p99", "median latency s")
    return _filled(made, playings, columns, rows)


def reasons_table(playings: Sequence[Playing]) -> Table:
    """The reasons, from the records of every play."""
    made = Table(
        title="why: iterations in which a request joined others, or left them; rows for nothing, of all;"
        " seconds that a request waited, in the mean"
    )
    rows: list[list[str]] = []
    for one in playings:
        why, n = one.figures.reasons, one.figures.n_requests
        rows.append(
            [
                str(why.iterations),
                f"{why.rows / why.iterations:.1f}",
                str(why.late_joining),
                str(why.early_finished),
                f"{why.fed_rows / why.rows:.0%}",
                f"{why.done_rows / why.rows:.0%}",
                f"{why.waited_to_begin / n:.2f}",
                f"{why.waited_for_batch / n:.2f}",
            ]
        )
    columns = ("iterations", "rows each", "late-joining", "early-finished")
    columns += ("fed", "done", "to begin", "for its batch")
    return _filled(made, playings, columns, rows)


def _filled(
    made: Table, playings: Sequence[Playing], columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> Table:
    """Put rate and system before each row."""
    made.add_column("req/s", justify="right")
    made.add_column("system")
    for column in columns:
        made.add_column(column, justify="right")
    rate = None
    for one, row in zip(playings, rows, strict=True):
        if rate not in (None, one.rate):
            made.add_section()
        made.add_row(f"{one.rate:.3g}" if one.rate != rate else "", one.system.label, *row)
        rate = one.rate
    return made


def by_rate(playings: Sequence[Playing]) -> Table:
    """For each rate, the system of each kind with the lowest median normalized latency."""
    made = Table(title="the best of each at every rate")
    for column in (
        "req/s",
        "orca",
        "finished/s",
        "ms a token",
        "ft",
        "finished/s",
        "ms a token",
        "latency ratio",
    ):
        made.add_column(column, justify="left" if column in ("orca", "ft") else "right")
    for rate in dict.fromkeys(one.rate for one in playings):
        cells: list[str] = []
        medians: list[float] = []
        for is_orca in (True, False):
            here = [one for one in playings if one.rate == rate and one.system.is_orca is is_orca]
            if not here:
                cells += ["past all", "", ""]
                continue
            best = min(here, key=lambda one: one.figures.normalized_median)
            medians.append(best.figures.normalized_median)
            cells += [best.system.label, f"{best.figures.req_s:.3g}", f"{medians[-1] * 1e3:.1f}"]
        made.add_row(f"{rate:.3g}", *cells, f"{medians[1] / medians[0]:.2f}" if len(medians) == 2 else "")
    return made


def honesty_table(found: Sequence[Honesty]) -> Table:
    """Requests a second of ORCA over the baseline where scheduling makes no difference."""
    made = Table(title="all requests there at once: ORCA over the baseline, median (least to most)")
    for column in ("case", "ORCA", "without overlap"):
        made.add_column(column, justify="left" if column == "case" else "right")
    for one in found:
        made.add_row(
            one.case,
            *(
                f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
                for ratios in (one.overlap, one.no_overlap)
            ),
        )
    return made


def points(playings: Sequence[Playing]) -> dict[str, list[dict[str, Any]]]:
    """Each system's points, by ascending rate."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in playings:
        figures = one.figures
        found.setdefault(one.system.label, []).append(
            {
                "rate": round(one.rate, 4),
                "req_s": round(figures.req_s, 4),
                "tokens_s": round(figures.tokens_s, 2),
                "median_ms": round(figures.normalized_median * 1e3, 2),
                "p90_ms": round(figures.normalized_p90 * 1e3, 2),
                "p99_ms": round(figures.normalized_p99 * 1e3, 2),
                "latency_s": round(figures.latency_median, 4),
            }
        )
    return found
