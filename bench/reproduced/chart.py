"""Panels of lines or bars as one SVG document."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

_INK, _MUTED, _GRID = "#1f2328", "#59636e", "#d1d9e0"
COLORS = ("#0969da", "#bf8700", "#8250df", "#1a7f37", "#cf222e", "#59636e")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 380, 280, 56, 44, 42, 14
_TICKS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Lines of points (x, y) by name. `marks` are horizontal lines with a text, such as a limit."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    marks: Mapping[str, float] = field(default_factory=dict[str, float])
    most_y: float | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    """A stacked bar for each name: its parts, and a text after it."""

    title: str
    parts: Sequence[str]
    rows: Mapping[str, tuple[Sequence[float], str]]


def document(panels: Sequence[Panel | Bars]) -> str:
    """The panels side by side."""
    drawn: list[str] = []
    for i, panel in enumerate(panels):
        inside = _lines(panel) if isinstance(panel, Panel) else _bars(panel)
        drawn.append(f'<g transform="translate({i * _WIDTH} 0)">{inside}</g>')
    width = _WIDTH * len(panels)
    style = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="11"'
    size = f'width="{width}" height="{_HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {_HEIGHT}" {style}>'
    return "\n".join([head, f'<rect {size} fill="#ffffff"/>', *drawn, "</svg>"]) + "\n"


def _lines(panel: Panel) -> str:
    points = [point for line in panel.lines.values() for point in line]
    most_x = _round_end(max((x for x, _ in points), default=1.0))
    most_y = panel.most_y or _round_end(max([y for _, y in points] + [*panel.marks.values()], default=1.0))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / most_x * width, _HEIGHT - _BOTTOM - min(y, most_y) / most_y * height

    parts = [_text(_LEFT, 16, panel.title, color=_INK, weight="600")]
    for i in range(_TICKS + 1):
        x, y = at(most_x * i / _TICKS, most_y * i / _TICKS)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{_GRID}" stroke-width="0.6"/>')
        parts.append(_text(_LEFT - 6, y + 4, _number(most_y * i / _TICKS), anchor="end"))
        parts.append(_text(x, _HEIGHT - _BOTTOM + 15, _number(most_x * i / _TICKS), anchor="middle"))
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 8, panel.x_label, anchor="end"))
    parts.append(_text(_LEFT, 32, panel.y_label))
    for text, value in panel.marks.items():
        _, y = at(0, value)
        across = f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"
        parts.append(f'<path d="{across}" stroke="{_MUTED}" stroke-dasharray="4 3"/>')
        parts.append(_text(_WIDTH - _RIGHT - 4, y - 4, text, anchor="end"))
    for i, (name, line) in enumerate(panel.lines.items()):
        color = COLORS[i % len(COLORS)]
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        for x, y in (at(*point) for point in line if len(line) <= 24):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>')
        parts.append(_text(_LEFT + 10, _TOP + 14 + 15 * i, name, color=color))
    return "".join(parts)


def _bars(panel: Bars) -> str:
    left, width = 124, _WIDTH - 124 - 46
    parts = [_text(8, 16, panel.title, color=_INK, weight="600")]
    x = 8.0
    for i, name in enumerate(panel.parts):
        parts.append(_text(x, 34, name, color=COLORS[i % len(COLORS)]))
        x += 8.0 + 6.2 * len(name)
    longest = max((sum(values) for values, _ in panel.rows.values()), default=1.0) or 1.0
    for row, (name, (values, note)) in enumerate(panel.rows.items()):
        y = 48 + 22 * row
        parts.append(_text(left - 6, y + 12, name, color=_INK, anchor="end"))
        at = float(left)
        for i, value in enumerate(values):
            w = value / longest * width
            parts.append(
                f'<rect x="{at:.1f}" y="{y}" width="{w:.1f}" height="16" fill="{COLORS[i % len(COLORS)]}"/>'
            )
            at += w
        parts.append(_text(at + 4, y + 12, note, color=_INK))
    return "".join(parts)


def _round_end(value: float) -> float:
    """The end of an axis that reaches `value` with round numbers at its ticks."""
    step = (value or 1.0) / _TICKS
    power = 10.0 ** math.floor(math.log10(step))
    return _TICKS * next(power * n for n in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if power * n >= step * 0.999)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(
    x: float, y: float, text: str, *, color: str = _MUTED, weight: str = "400", anchor: str = "start"
) -> str:
    look = f'fill="{color}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
