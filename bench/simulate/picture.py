"""Plots the simulated Figure 10: median normalized latency against throughput, one panel per variant."""

from collections.abc import Sequence
from pathlib import Path

from bench.paper.pyplot import pyplot
from bench.simulate.figure_10 import FIGURES, Variant


def draw(name: str, variants: Sequence[tuple[str, Variant]], path: Path) -> None:
    """Write a PNG, or the format of `path`'s suffix. Raises ImportError without matplotlib."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(variants), figsize=(6.5 * len(variants), 4.5), squeeze=False)
    for axis, (title, variant) in zip(axes[0], variants, strict=True):
        for label, points in variant.curves.items():
            orca = label.startswith("orca")
            axis.plot(
                [point.req_s for point in points],
                [point.normalized_median * 1e3 for point in points],
                marker="o" if orca else "x",
                linestyle="-" if orca else "--",
                markersize=4,
                label=label,
            )
        axis.axhline(variant.latency * 1e3, linestyle=":", color="gray")
        paper = FIGURES[name].paper
        if "orca_req_s" in paper:
            for key in ("orca_req_s", "baseline_req_s"):
                axis.plot(paper[key], paper["normalized_latency_ms"], "k*", markersize=11)
        axis.set(
            title=title,
            xlabel="requests a second",
            ylabel="median normalized latency, ms",
            xscale="log",
            yscale="log",
        )
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    preset = FIGURES[name].preset
    figure.suptitle(f"Figure {name}, simulated: {preset}; stars: the paper's points at 190 ms")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
