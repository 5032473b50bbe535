"""The comparison as one SVG: for each trace, a bar per policy of the figure that the trace is about."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from bench.policies.policies import BASELINE
from bench.policies.table import Row


@dataclass(frozen=True, slots=True)
class _Measure:
    """A panel's figure; `value` is None if a policy does not have it."""

    label: str
    more_is_better: bool
    value: Callable[[Row], float | None]
    text: Callable[[float], str]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


_IN_BOUND = _Measure(
    "tokens per second at the latency bound",
    True,
    lambda row: None if row.highest is None else row.highest[1],
    lambda tokens_s: f"{tokens_s:,.0f}",
)
_AT_RATE = _Measure(
    "tokens per second", True, lambda row: row.figures.tokens_s, lambda tokens_s: f"{tokens_s:,.0f}"
)
_FIRST = _Measure("median time to first token", False, lambda row: row.figures.first_p50, _ms)
_BETWEEN = _Measure(
    "longest time between tokens",
    False,
    lambda row: None if row.policy == BASELINE else row.figures.between_most,
    _ms,
)
_TENANT = _Measure(
    "p99 of normalized latency, the quiet tenant's", False, lambda row: row.figures.normalized_p99, _ms
)
_MEASURES = {"conversations": _FIRST, "long prompts": _BETWEEN, "tenants": _TENANT}

_WIDTH, _LEFT, _BAR_WIDTH, _LINE = 760, 210, 430, 20
_INK, _MUTED, _BAR, _ACCENT = "#1f2328", "#59636e", "#aab4be", "#0969da"
_FAR = 8.0  # a bar this many times longer than the median one is cut


def picture(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    """An SVG document. Shorter is better for times; bars that would dwarf all others are cut."""
    parts: list[str] = []
    y = 12.0
    for name, title in titles.items():
        panel = [row for row in rows if row.case == name]
        measure = _MEASURES.get(name)
        if measure is None:
            measure = _IN_BOUND if any(row.highest for row in panel) else _AT_RATE
        y += 18
        parts.append(_text(16, y, title, size=13, weight="600"))
        y += 16
        better = "more is better" if measure.more_is_better else "less is better"
        parts.append(_text(16, y, f"{measure.label} ({better})", color=_MUTED))
        y += 8
        parts += _bars(panel, measure, y)
        y += _LINE * len(panel) + 10
    size = f'width="{_WIDTH}" height="{y:.0f}" viewBox="0 0 {_WIDTH} {y:.0f}"'
    style = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12"'
    background = f'<rect width="{_WIDTH}" height="{y:.0f}" fill="#ffffff"/>'
    document = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', background, *parts, "</svg>"]
    return "\n".join(document) + "\n"


def _bars(panel: Sequence[Row], measure: _Measure, top: float) -> list[str]:
    values = [measure.value(row) for row in panel]
    known = sorted(value for value in values if value is not None)
    limit = min(known[-1], _FAR * known[len(known) // 2]) if known else 0.0
    longest = max((value for value in known if value <= limit), default=0.0)
    parts: list[str] = []
    for i, (row, value) in enumerate(zip(panel, values, strict=True)):
        y = top + _LINE * i
        parts.append(_text(_LEFT - 8, y + 14, row.policy, anchor="end"))
        if value is None:
            parts.append(_text(_LEFT, y + 14, "-", color=_MUTED))
            continue
        is_cut = value > limit
        width = _BAR_WIDTH * (1.0 if is_cut or not longest else value / longest)
        color = _ACCENT if row.policy.startswith("all") else _BAR
        parts.append(
            f'<rect x="{_LEFT}" y="{y + 3:.1f}" width="{width:.1f}" height="14" rx="2" fill="{color}"/>'
        )
        if is_cut:
            parts.append(
                f'<rect x="{_LEFT + _BAR_WIDTH - 24}" y="{y + 1:.1f}" width="5" height="18" fill="#ffffff"/>'
            )
        parts.append(_text(_LEFT + width + 6, y + 14, measure.text(value)))
    return parts


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    weight: str = "400",
    color: str = _INK,
    anchor: str = "start",
) -> str:
    look = f'font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
