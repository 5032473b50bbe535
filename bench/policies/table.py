"""The figures as text, as markdown and as records for JSON."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.policies.figures import Figures
from bench.policies.policies import BASELINE


@dataclass(frozen=True, slots=True)
class Row:
    """A policy on a trace: figures at `rate`, and the highest rate within the bound with its tokens/s."""

    case: str
    policy: str
    rate: float
    figures: Figures
    highest: tuple[float, float] | None = None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        rate, tokens_s = self.highest or (None, None)
        return {
            "case": self.case,
            "policy": self.policy,
            "highest_rate": rate,
            "highest_tokens_s": tokens_s,
            "rate": self.rate if math.isfinite(self.rate) else None,  # of requests that all come at once
            **self.figures.record(),
        }


HEADER = (
    *("policy", "tok/s in bound", "req/s", "tok/s", "latency", "norm. p50", "p99", "first p50", "p99"),
    *("between p50", "p99", "most", "in use", "twice", "cached", "preempted"),
)


def cells(row: Row) -> list[str]:
    """A row's figures as text; times in milliseconds."""
    f = row.figures
    # The baseline delivers a request's tokens together, at the end of its batch.
    between = (f.between_p50, f.between_p99, f.between_most)
    return [
        row.policy,
        "" if row.highest is None else f"{row.highest[1]:,.0f}",
        f"{row.rate:.3g}",
        f"{f.tokens_s:,.0f}",
        _ms(f.latency_mean),
        *(_ms(seconds) for seconds in (f.normalized_p50, f.normalized_p99, f.first_p50, f.first_p99)),
        *("-" if row.policy == BASELINE else _ms(seconds) for seconds in between),
        f"{f.slots_in_use:.0%}",
        f"{f.n_recomputed:,}",
        f"{f.cached_share:.0%}",
        f"{f.n_preemptions:,}",
    ]


def text_table(title: str, rows: Sequence[Row]) -> str:
    """Columns aligned with spaces."""
    lines = [HEADER, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    aligned = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([title, *aligned])


def markdown_table(title: str, rows: Sequence[Row]) -> str:
    """A Markdown table for docs/scheduling.md."""
    lines = [HEADER, ["---", *["---:"] * (len(HEADER) - 1)], *(cells(row) for row in rows)]
    return "\n".join([f"**{title}**", "", *("| " + " | ".join(line) + " |" for line in lines)])


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
