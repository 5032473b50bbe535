"""An attack's cost as table rows, as a verdict, and as JSON."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.table import Table

from bench.hostile.footprint import Footprint
from bench.hostile.target import OUTPUT_FAILED
from bench.hostile.trial import Cost

# How much longer a stream's gap, and the answer to a probe, may be than in the control.
ALLOWED_GAP_SECONDS, ALLOWED_SECONDS = 0.05, 0.25
BUSY_CORES = 0.5  # processor time of the attacker from which the control has a busy core too

# Answers that no attack may cause, in addition to HTTP's 5xx other than 503.
FAULTS = ("INTERNAL", "UNKNOWN", "DATA_LOSS", "had to be stopped")

# How far the last quarter's median may be above the second quarter's if nothing leaks, as in
# bench/server/soak.py.
RSS_GROWTH, RSS_SLACK = 1.08, 16e6
FILES_SLACK, THREADS_SLACK = 24, 8
LEAST_ROUNDS = 4  # needed to judge growth


@dataclass(slots=True)
class Report:
    """The waits without an attacker and with each attack, and the server after each round.

    `busy` are the waits while another process takes a core, as an attacker does that shares the machine.
    """

    seconds: float
    baseline: Cost | None = None
    busy: Cost | None = None
    costs: list[Cost] = field(default_factory=list[Cost])
    rounds: list[Footprint] = field(default_factory=list[Footprint])
    round_costs: list[Cost] = field(default_factory=list[Cost])
    n_servers: int = 1
    exit_status: int = 0
    traceback: str = ""

    def control(self, cost: Cost) -> Cost:
        """The waits that this attack is compared with."""
        assert self.baseline is not None
        if self.busy is None or cost.attacker_cores < BUSY_CORES:
            return self.baseline
        return self.busy

    def complaints(self, cost: Cost) -> list[str]:
        """The forbidden effects of one attack."""
        control = self.control(cost).waits
        complaints: list[str] = []
        if cost.blocked:
            complaints.append(f"the server was blocked for over {cost.seconds:.0f} s and had to be killed")
        for what, wait, usual, allowed in (
            ("a stream's gap", cost.waits.between, control.between, ALLOWED_GAP_SECONDS),
            ("/health", cost.waits.health, control.health, ALLOWED_SECONDS),
            ("an answer to 10 kB", cost.waits.long, control.long, ALLOWED_SECONDS),
        ):
            if wait > usual + allowed:
                complaints.append(f"{what} was {wait:.3f} s, without an attacker {usual:.3f} s")
        if cost.answers is not None:
            faults = [what for what in cost.answers.n if what in FAULTS or what[0] == "5"]
            faults = [what for what in faults if what not in ("503", OUTPUT_FAILED)]
            complaints += [
                f"the attacker got {what}: {cost.answers.messages.get(what, '')}" for what in faults
            ]
        if cost.waits.n_wrong:
            complaints.append(f"{cost.waits.n_wrong} failures of neighbours, first: {cost.waits.wrong[0]}")
        return [f"{cost.name}: {complaint}" for complaint in complaints]

    def failures(self) -> list[str]:
        """Everything that happened but must not."""
        failures = [
            complaint for cost in (*self.costs, *self.round_costs) for complaint in self.complaints(cost)
        ]
        failures += self._growth()
        if self.exit_status != 0:
            failures.append(f"after SIGTERM the server ended with {self.exit_status}")
        if self.traceback:
            failures.append(f"a traceback in the server's stderr: {self.traceback}")
        return failures

    def _growth(self) -> list[str]:
        n = len(self.rounds)
        if n < LEAST_ROUNDS:
            return []
        second, last = self.rounds[n // 4 : n // 2], self.rounds[3 * n // 4 :]
        growth: list[str] = []
        rss, rss_end = (median(footprint.rss for footprint in some) for some in (second, last))
        if rss_end > RSS_GROWTH * rss + RSS_SLACK:
            growth.append(f"memory grew from {rss / 1e6:.0f} to {rss_end / 1e6:.0f} MB over the rounds")
        files, files_end = (median(footprint.files for footprint in some) for some in (second, last))
        if files_end > files + FILES_SLACK:
            growth.append(f"open descriptors grew from {files:.0f} to {files_end:.0f} over the rounds")
        threads, threads_end = (median(footprint.threads for footprint in some) for some in (second, last))
        if threads_end > threads + THREADS_SLACK:
            growth.append(f"threads grew from {threads:.0f} to {threads_end:.0f} over the rounds")
        return growth


def answers_text(cost: Cost) -> str:
    """The attacker's answers: statuses with their counts, and one message."""
    if cost.answers is None:
        return ""
    counts = ", ".join(f"{what} x {n}" for what, n in cost.answers.n.most_common(5))
    message = next(
        (
            cost.answers.messages[what]
            for what, _ in cost.answers.n.most_common()
            if what in cost.answers.messages
        ),
        "",
    )
    return f"{counts}: {message}" if message else counts


def attack_table(report: Report) -> Table:
    """A row per attack, after one for the waits without an attacker."""
    table = Table(
        title=f"waits of well-behaved clients, in milliseconds, each attack for {report.seconds:g} s"
    )
    columns = (
        *("attack", "longest gap", "first chunk", "/health", "10 kB body", "streams"),
        *("loop held", "GIL held", "attacker's cores"),
        *("memory, MB", "descriptors", "threads", "answers to the attacker"),
    )
    for column in columns:
        table.add_column(column, justify="left" if column in (columns[0], columns[-1]) else "right")
    for cost in (report.baseline, report.busy, *report.costs):
        if cost is not None:
            table.add_row(*_cells(report, cost))
    return table


def _cells(report: Report, cost: Cost) -> Sequence[str]:
    bad, waits = bool(report.complaints(cost)), cost.waits
    grown = (
        f"{(cost.after.rss - cost.before.rss) / 1e6:+.0f} ({(cost.most.rss - cost.before.rss) / 1e6:+.0f})"
    )
    return (
        f"{cost.name} *" if bad else cost.name,
        *(f"{1e3 * wait:.0f}" for wait in (waits.between, waits.first, waits.health, waits.long)),
        f"{cost.waits.n_streams}" + (f", {cost.waits.n_wrong} failed" if cost.waits.n_wrong else ""),
        *(f"{1e3 * held:.0f}" for held in (cost.holds.loop, cost.holds.gil)),
        f"{cost.attacker_cores:.2f}",
        grown,
        f"{cost.after.files - cost.before.files:+d} ({cost.most.files - cost.before.files:+d})",
        f"{cost.after.threads - cost.before.threads:+d} ({cost.most.threads - cost.before.threads:+d})",
        answers_text(cost),
    )


def round_table(report: Report) -> Table:
    """The server after each round of all attacks."""
    table = Table(title="the server after each round of all attacks")
    for column in ("round", "memory, MB", "descriptors", "threads"):
        table.add_column(column, justify="right")
    for number, footprint in enumerate(report.rounds, 1):
        table.add_row(str(number), f"{footprint.rss / 1e6:.0f}", str(footprint.files), str(footprint.threads))
    return table


def summary(report: Report) -> dict[str, Any]:
    """The figures, for the last line."""
    failures = report.failures()
    return {
        "benchmark": "hostile",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "seconds": report.seconds,
        "passed": not failures,
        "failures": failures,
        "baseline": None if report.baseline is None else _figures(report.baseline),
        "busy": None if report.busy is None else _figures(report.busy),
        "attacks": {cost.name: _figures(cost) for cost in report.costs},
        "rounds": [
            {"rss_mb": round(footprint.rss / 1e6, 1), "files": footprint.files, "threads": footprint.threads}
            for footprint in report.rounds
        ],
        "longest_in_rounds": {
            "between": round(max((cost.waits.between for cost in report.round_costs), default=0.0), 3),
            "health": round(max((cost.waits.health for cost in report.round_costs), default=0.0), 3),
        },
        "servers": report.n_servers,
    }


def _figures(cost: Cost) -> dict[str, Any]:
    return {
        "between": round(cost.waits.between, 3),
        "first": round(cost.waits.first, 3),
        "health": round(cost.waits.health, 3),
        "long": round(cost.waits.long, 3),
        "loop_held": round(cost.holds.loop, 3),
        "gil_held": round(cost.holds.gil, 3),
        "attacker_cores": round(cost.attacker_cores, 2),
        "streams": cost.waits.n_streams,
        "failed": cost.waits.n_wrong,
        "rss_mb": round((cost.after.rss - cost.before.rss) / 1e6, 1),
        "most_rss_mb": round((cost.most.rss - cost.before.rss) / 1e6, 1),
        "files": cost.after.files - cost.before.files,
        "threads": cost.after.threads - cost.before.threads,
        "answers": {} if cost.answers is None else dict(cost.answers.n),
        "blocked": cost.blocked,
    }
