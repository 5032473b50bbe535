"""Figures 9, 10 and 11 as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.paper.pyplot import pyplot
from bench.paper.serving_curve import Curve

_MARKS = "osD^vP*Xh"


def draw_engine(medians: Mapping[str, Mapping[int, float]], path: Path, title: str) -> None:
    """Figure 9: seconds of a batch by its requests, a line for each label. Raises ImportError."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 5))
    for i, (label, line) in enumerate(medians.items()):
        style = _style(label, i)
        axis.plot(list(line), [seconds * 1e3 for seconds in line.values()], label=label, **style)
    batches = sorted({batch for line in medians.values() for batch in line})
    axis.set(xlabel="batch size", ylabel="execution time (ms)", xscale="log", title=title)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    _finish(plt, figure, [axis], path)


def draw_curves(
    curves: Mapping[str, Curve], path: Path, title: str, *, normalized: bool, target: float | None
) -> None:
    """Figures 10 and 11: median latency over throughput, a line for each system. Raises ImportError.

    With `normalized` latency is divided by generated tokens. `target`, in seconds, is drawn as a line.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 5.5))
    for i, (label, curve) in enumerate(curves.items()):
        latencies = [(one.normalized_median * 1e3 if normalized else one.latency_median) for one in curve]
        axis.plot([one.req_s for one in curve], latencies, label=label, **_style(label, i))
    if target is not None:
        label = "twice the engine's own execution time a token"
        axis.axhline(target * 1e3, linestyle=":", color="gray", label=label)
    axis.set(
        xlabel="throughput (requests a second)",
        ylabel="median normalized latency (ms a token)" if normalized else "median latency (s)",
        yscale="log",
        title=title,
    )
    axis.set_xlim(left=0)
    _finish(plt, figure, [axis], path)


def _style(label: str, i: int) -> dict[str, Any]:
    """Solid lines for ORCA, dashed ones for the baseline."""
    return {"marker": _MARKS[i % len(_MARKS)], "linestyle": "-" if label.startswith("orca") else "--"}


def _finish(plt: Any, figure: Any, axes: Sequence[Any], path: Path) -> None:
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
