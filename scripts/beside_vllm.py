"""Draws the README's comparison with vLLM, from the figures in bench/LOG.md.

    python -m scripts.beside_vllm

Writes docs/figures/beside-vllm.svg. A new measurement is a new entry of the log: name it in ENTRY.
"""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

ENTRY = "2026-11-23, beside vLLM, both with their prefix cache and chunked prefill on"
LOG = Path(__file__).parents[1] / "bench" / "LOG.md"
PICTURE = LOG.parents[1] / "docs" / "figures" / "beside-vllm.svg"

# A case in the log, its name in the figure, and the panels' titles.
_CASES = {
    "paper's 30 at once": "the paper's trace, all at once",
    "32 equal": "32 equal requests",
    "paper's, 1.1/s": "the paper's trace, 1.1 requests/s",
    "paper's, 2.03/s": "the paper's trace, 2.03 requests/s",
    "conversations, 0.5/s": "conversations, 0.5 begin a second",
    "conversations, 1.5/s": "conversations, 1.5 begin a second",
}
_PANELS = (
    ("Output tokens a second (more is better)", 0),
    ("Latency a token, median, ms (less is better)", 0),
    ("Latency a token, 99th percentile, ms (less is better)", 1),
)
_WIDTH, _LEFT, _BAR = 760, 250, 420
_STYLE = """<style>
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .ours { fill: #0969da } .theirs { fill: #aab4be } .muted { fill: #59636e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .ours { fill: #4493f8 } .theirs { fill: #6e7681 } .muted { fill: #9198a1 }
}
</style>"""

Bars = tuple[str, float, float]


def entry(log: str) -> dict[str, tuple[list[float], list[float]]]:
    """Our figures and vLLM's, by case of ENTRY."""
    text = log.split(f"## {ENTRY}\n", 1)[1].split("\n## ", 1)[0]
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|"))
    return {cells[0]: (_numbers(cells[1]), _numbers(cells[2])) for cells in rows if cells[0] in _CASES}


def _numbers(cell: str) -> list[float]:
    """The figures of a cell, without the least and the most in parentheses."""
    return [float(number) for number in re.sub(r"\(.*\)", "", cell).split(",")]


def panels(figures: dict[str, tuple[list[float], list[float]]]) -> list[tuple[str, list[Bars]]]:
    """The panels: cases with one figure are throughputs, those with two are the latencies."""
    drawn = list[tuple[str, list[Bars]]]()
    for number, (title, which) in enumerate(_PANELS):
        chosen = {case: both for case, both in figures.items() if (len(both[0]) > 1) == (number > 0)}
        bars = [(_CASES[case], ours[which], theirs[which]) for case, (ours, theirs) in chosen.items()]
        drawn.append((title, bars))
    return drawn


def picture(drawn: Sequence[tuple[str, list[Bars]]]) -> str:
    """An SVG document, for a light and for a dark page."""
    parts, y = list[str](), 22
    parts.append(_text(_LEFT, y, "orca_jax", "ours") + _text(_LEFT + 70, y, "vLLM", "muted"))
    for title, bars in drawn:
        y += 26
        parts.append(_text(16, y, title, "title"))
        longest = max(max(ours, theirs) for _, ours, theirs in bars)
        for name, ours, theirs in bars:
            y += 10
            parts.append(_text(32, y + 14, name))
            for kind, value in (("ours", ours), ("theirs", theirs)):
                width = _BAR * value / longest
                parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="11"/>')
                parts.append(_text(_LEFT + width + 6, y + 10, f"{value:g}"))
                y += 13
    y += 14
    size = f'width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}"'
    return "\n".join((f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _STYLE, *parts, "</svg>")) + "\n"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.0f}" y="{y}">{escape(text)}</text>'


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture(panels(entry(LOG.read_text(encoding="utf-8")))), encoding="utf-8")


if __name__ == "__main__":
    main()
