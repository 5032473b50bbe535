"""Plays the traces of a case with each of its policies."""

from collections.abc import Callable
from typing import Protocol

from bench.policies.cases import Case
from bench.policies.figures import Figures
from bench.policies.limits import Limits
from bench.policies.policies import BASELINE
from bench.policies.search import highest_rate
from bench.policies.table import Row
from bench.policies.traces import Trace


class Machine(Protocol):
    """A machine that plays traces."""

    def play(self, policy: str, limits: Limits, trace: Trace) -> Figures:
        """Play the trace on a new engine."""
        ...


def compare(
    name: str, case: Case, machine: Machine, on_row: Callable[[str], object] = lambda label: None
) -> list[Row]:
    """A row for each policy and each reference of the case."""
    highest: dict[str, tuple[float, Figures] | None] = {}
    rate = case.rate
    if case.bound is not None:
        for policy in case.policies:
            on_row(f"{policy}, highest rate")

            def at(tried: float, policy: str = policy) -> Figures:
                trace = case.make(tried)
                # At rates within the bound the baseline's batches are small, so fewer requests suffice.
                part = trace[: max(8, len(trace) // 10)] if policy == BASELINE else trace
                return machine.play(policy, case.limits, part)

            start = case.rate / (16 if policy == BASELINE else 1)
            highest[policy] = highest_rate(at, case.bound, start)
        orca = highest["orca"]
        rate = case.rate if orca is None else orca[0]
    trace = case.make(rate)
    plays = [(policy, policy, trace) for policy in case.policies]
    plays += [(label, policy, make()) for label, policy, make in case.references]
    rows: list[Row] = []
    for label, policy, played in plays:
        on_row(label)
        found = highest.get(policy)
        in_bound = None if found is None else (found[0], found[1].tokens_s)
        rows.append(Row(name, label, rate, machine.play(policy, case.limits, played), in_bound))
    return rows
