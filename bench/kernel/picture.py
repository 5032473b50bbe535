"""The kernel benchmark as a picture: shares of the ceilings, ours and the peers'."""

from collections.abc import Iterable
from pathlib import Path

from bench.kernel.results import Result, figures
from bench.kernel.shapes import HEADS
from bench.paper.pyplot import pyplot
from orca_jax.planning.cost_model import Device

MARKS = {
    "kernel": "o", "static": "s", "per request": "v", "cudnn": "D", "decode_attention": "^",
    "paged_attention": "P", "torch": "X",
}  # fmt: skip


def draw(results: Iterable[Result], device: Device, path: Path, title: str) -> None:
    """Write an image in the format of `path`'s suffix. Raises ImportError without matplotlib."""
    plt = pyplot()
    figure, axes = plt.subplots(2, len(HEADS), figsize=(7 * len(HEADS), 9), squeeze=False)
    points = [(r.task, figures(r, device)) for r in results if r.seconds is not None]
    for column, heads in enumerate(HEADS):
        for row, increments in enumerate((True, False)):
            axis = axes[row][column]
            name, share = (
                ("bandwidth", "bandwidth_share") if increments else ("matrix rate", "matrix_rate_share")
            )
            for subject, mark in MARKS.items():
                here = sorted(
                    (found["kv_bytes"] / 1e6 if increments else task.case.n_tokens, found[share] * 100)
                    for task, found in points
                    if task.subject == subject and task.case is not None and task.case.heads == heads
                    if task.case.increments_only == increments and len(set(task.case.rows)) == 1
                )
                if here:
                    ours = {"color": "black"} if subject == "kernel" else {"alpha": 0.8}
                    axis.plot(*zip(*here, strict=True), mark, label=subject, **ours)
            if increments:
                axis.axhline(85, xmin=0, linestyle=":", color="gray", label="aim from 256 MB on")
                axis.axvline(268.4, linestyle=":", color="gray")
            else:
                axis.axhline(60, linestyle=":", color="gray", label="aim from 2,048 tokens on")
            axis.set(
                title=f"{heads.name}: {'decode' if increments else 'prompts'}",
                xlabel="MB of keys and values" if increments else "tokens",
                ylabel=f"% of the measured {name}",
                xscale="log",
                ylim=(0, 105),
            )
            axis.grid(alpha=0.3)
            axis.legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
