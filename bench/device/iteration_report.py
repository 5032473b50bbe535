"""The output of `bench.iteration`: a line for each kind of iteration, and a table at the end."""

from dataclasses import dataclass

from rich.table import Table

from orca_jax.planning.cost_model import OperationKind

HIDDEN = 0.05  # fraction of an iteration; the host counts as hidden if the gap is below it
PARTS: tuple[OperationKind, ...] = ("linear", "attention", "head", "sampler")


@dataclass(frozen=True)
class Measured:
    """One kind of iteration: its time and floor in seconds, in total and by part. The host has no floor.

    `bound_by_bytes` is the part of the floor that comes from reads and writes.
    """

    name: str
    aim: float | None
    iteration: float
    fastest: float
    without_overlap: float
    gap: float
    floor: float
    bound_by_bytes: float
    parts: dict[str, float]
    part_floors: dict[str, float]


def table(rows: list[Measured]) -> Table:
    """The measured rows in milliseconds, each part with its floor."""
    result = Table(title="milliseconds (floor) of an iteration and its parts")
    columns = ("iteration", "median", "fastest", "no overlap", "floor", "over floor", "aim", "gap", "host")
    for column in (*columns, *PARTS, "rest"):
        result.add_column(column, justify="left" if column == "iteration" else "right")
    for row in rows:
        rest = row.iteration - row.gap - sum(row.parts[kind] for kind in PARTS)
        result.add_row(
            row.name,
            f"{row.iteration * 1e3:.2f}",
            f"{row.fastest * 1e3:.2f}",
            f"{row.without_overlap * 1e3:.2f}",
            f"{row.floor * 1e3:.2f}",
            f"{row.iteration / row.floor:.2f}",
            "" if row.aim is None else f"{row.aim:.2f}",
            f"{row.gap * 1e3:.3f}",
            f"{row.parts['host'] * 1e3:.2f}",
            *(f"{row.parts[kind] * 1e3:.2f} ({row.part_floors[kind] * 1e3:.2f})" for kind in PARTS),
            f"{rest * 1e3:.2f}",
        )
    return result


def verdict(row: Measured) -> str:
    """One line: what bounds this kind of iteration, its ratio to the floor, and the part that loses most."""
    bound = "memory bandwidth" if row.bound_by_bytes > 0.5 * row.floor else "the matrix rate"
    losses = {kind: row.parts[kind] - row.part_floors[kind] for kind in PARTS}
    losses["the gap between iterations"] = row.gap
    losses["the rest"] = row.iteration - row.gap - sum(row.parts[kind] for kind in PARTS)
    most = max(losses, key=lambda kind: losses[kind])
    host = "hidden" if row.gap <= HIDDEN * row.iteration else "not hidden"
    aim = "" if row.aim is None else f", aim {row.aim:.2f}"
    return (
        f"{row.name}: bound by {bound}, {row.iteration / row.floor:.2f} times its floor{aim}; "
        f"most is lost in {most} ({losses[most] / row.iteration:.0%}); "
        f"the host's {row.parts['host'] * 1e3:.2f} ms are {host} (gap {row.gap / row.iteration:.1%})"
    )
