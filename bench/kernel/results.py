"""One result of the kernel benchmark, relative to the floor and the ceilings."""

from dataclasses import dataclass, field
from typing import Any

from bench.kernel.shapes import Task
from orca_jax.planning.cost_model import Device


@dataclass(frozen=True, slots=True)
class Result:
    """A task's values, or in `failed` why it has none."""

    task: Task
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    failed: str | None = None

    @property
    def seconds(self) -> float | None:
        """The median time of one call, if the task measured it."""
        return self.values.get("seconds")


def figures(result: Result, device: Device) -> dict[str, float]:
    """Bandwidth and matrix rate of a timed result, their shares of the ceilings, the floor, and time over
    floor.
    """
    case, seconds = result.task.case, result.seconds
    assert case is not None and seconds is not None
    bandwidth, rate, floor = case.n_bytes / seconds, case.n_flops / seconds, case.floor(device)
    return {
        "kv_bytes": case.kv_bytes,
        "bandwidth": bandwidth,
        "bandwidth_share": bandwidth / device.bandwidth,
        "matrix_rate": rate,
        "matrix_rate_share": rate / device.matrix_rate,
        "floor": floor,
        "over_floor": seconds / floor,
    }


def microseconds(seconds: float) -> str:
    """Format microseconds with at least three significant digits."""
    us = seconds * 1e6
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


HEAD = (
    f"{'case':<55}{'us':>9}{'+-%':>5}{'host us':>8}{'GB/s':>6}{'%':>4}{'TF/s':>6}{'%':>4}{'floor':>8}{'x':>6}"
    f"{'error':>9}"
)


def line(result: Result, device: Device | None) -> str:
    """One line of text; for timed results in the columns of HEAD."""
    task, values = result.task, result.values
    name = task.name.split(": ", 1)[-1] if task.case else task.name
    if result.failed is not None:
        return f"{name:<55} no result: {result.failed}"
    if task.section == "correctness":
        moved = values["n_runs"] - values["n_equal"]
        return (
            f"{name:<40} error {values['relative']:.1e}, largest {values['largest']:.1e}; "
            f"{'different in ' + str(moved) if moved else 'equal in all'} of {values['n_runs']} runs, "
            f"{values['poisoned']} poisoned"
            f"{'' if values['finite'] else '; NOT FINITE'}"
            f"{'' if values['padding_zero'] else '; PADDING NOT 0'}"
        )
    if task.section == "launches":
        kernels = (f"{kernel}: {of['launches']:.0f} x, {of['us']:.1f} us" for kernel, of in values.items())
        return "\n    ".join([name, *kernels])
    if result.seconds is None or device is None:
        return f"{name}: {values}"
    found = figures(result, device)
    error = values.get("error")
    off = (values["most"] - values["least"]) / 2 / result.seconds
    return (
        f"{name.removeprefix('kernel, '):<55}{microseconds(result.seconds):>9}{off * 100:>5.1f}"
        f"{microseconds(values['host']):>8}"
        f"{found['bandwidth'] / 1e9:>6.0f}{found['bandwidth_share'] * 100:>4.0f}"
        f"{found['matrix_rate'] / 1e12:>6.0f}{found['matrix_rate_share'] * 100:>4.0f}"
        f"{microseconds(found['floor']):>8}{found['over_floor']:>6.2f}"
        f"{'' if error is None else f'{error:.1e}':>9}"
    )
