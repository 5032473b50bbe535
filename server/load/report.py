"""The results of `orca bench` as a table and as a picture."""

from collections.abc import Sequence
from html import escape

from rich.table import Table

from server.load.figures import Figures, Times

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _RIGHT, _TOP = 640, 360, 64, 44, 20, 40
_INK, _MUTED, _LINES = "#1f2328", "#59636e", ("#0969da", "#bf8700", "#8250df")


def table(title: str, labels: Sequence[str], results: Sequence[Figures]) -> Table:
    """A row for each load: rates, then latencies in milliseconds at p50 / p99."""
    made = Table(title=title, caption="latencies in ms: p50 / p99")
    has_goodput = any(each.goodput is not None for each in results)
    columns = ("load", "done", "failed", "req/s", "tokens/s", "first token", "a token", "between", "whole")
    for i, name in enumerate((*columns, *(("good req/s",) if has_goodput else ()))):
        made.add_column(name, justify="right" if i else "left")
    for label, each in zip(labels, results, strict=True):
        cells = [
            *(label, str(each.n_completed), str(each.n_failed)),
            *(f"{each.requests_s:.2f}", f"{each.output_tokens_s:,.1f}"),
            *(_pair(kind) for kind in (each.first, each.per_token, each.between, each.whole)),
        ]
        made.add_row(*cells, *([f"{each.goodput or 0:.2f}"] if has_goodput else ()))
    return made


def details(each: Figures) -> Table:
    """One run's latencies: mean, and percentiles with their 95 % intervals."""
    made = Table(title="latency in ms, with 95 % intervals")
    for i, name in enumerate(("", "n", "mean", *(f"p{share}" for share in each.first.percentiles))):
        made.add_column(name, justify="right" if i else "left")
    for name, kind in (
        ("time to first token", each.first),
        ("time per output token", each.per_token),
        ("between two events", each.between),
        ("whole request", each.whole),
        ("normalized, per output token", each.normalized),
    ):
        cells = [
            f"{_ms(one.value)} ({_ms(one.low)} to {_ms(one.high)})" if kind.n else "-"
            for one in kind.percentiles.values()
        ]
        made.add_row(name, f"{kind.n:,}", _ms(kind.mean) if kind.n else "-", *cells)
    return made


def _pair(kind: Times) -> str:
    if not kind.n:
        return "-"
    return f"{_ms(kind.percentiles[50].value)} / {_ms(kind.percentiles[99].value)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def picture(title: str, labels: Sequence[str], results: Sequence[Figures]) -> str:
    """An SVG document: normalized latency over output tokens a second, as in Figure 10 of ORCA."""
    shown = [each for each in results if each.normalized.n]
    most_x = max((each.output_tokens_s for each in shown), default=0.0) or 1.0
    most_y = max((each.normalized.percentiles[99].value for each in shown), default=0.0) * 1e3 or 1.0

    def at(each: Figures, share: int) -> tuple[float, float]:
        x = _LEFT + each.output_tokens_s / most_x * (_WIDTH - _LEFT - _RIGHT)
        y = each.normalized.percentiles[share].value * 1e3 / most_y * (_HEIGHT - _TOP - _BOTTOM)
        return x, _HEIGHT - _BOTTOM - y

    parts = [
        _text(_LEFT, 20, title, color=_INK, weight="600"),
        _text(_WIDTH - _RIGHT, _HEIGHT - 8, f"output tokens a second, up to {most_x:,.0f}", anchor="end"),
        _text(_LEFT, _TOP - 6, f"normalized latency, ms a token, up to {most_y:,.1f}"),
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" fill="none" stroke="{_MUTED}"/>',
    ]
    for color, share in zip(_LINES, (50, 90, 99), strict=True):
        points = [at(each, share) for each in shown]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        if points:
            x, y = points[-1]
            parts.append(_text(x - 6, y - 6, f"p{share}", color=color, anchor="end"))
    for label, each in zip(labels, results, strict=True):
        if each.normalized.n:
            parts.append(_text(at(each, 50)[0], _HEIGHT - _BOTTOM + 14, label, anchor="middle"))
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    style = 'font-family="system-ui, sans-serif" font-size="12"'
    background = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(parts)}</svg>\n'


def _text(
    x: float, y: float, text: str, *, color: str = _MUTED, anchor: str = "start", weight: str = "400"
) -> str:
    look = f'fill="{color}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
