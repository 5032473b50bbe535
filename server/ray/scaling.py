"""How many engines the application needs for its load. Ray's controller asks every tenth of a second."""

import math
from collections.abc import Iterable
from typing import Any

from ray.serve.config import AutoscalingContext

LOAD = "orca_load"  # of one engine, as its replica reports it
_ROUNDING = 1e-9  # three loads of 0.1 come to 3 times 0.1, not 3.0000000000000004 times


def engines_for(loads: Iterable[float], *, target: float) -> int:
    """The fewest engines among which these loads come to at most `target` each; at least 1.

    A load is a fraction of one engine's capacity, and above 1 if requests wait. So the sum is what clients
    ask for, however it is spread; an engine that has just started counts as soon as it shares the work.
    """
    return max(1, math.ceil(sum(loads) / target - _ROUNDING))


class LoadPolicy:
    """Ray's autoscaling policy by the engines' own load. Ray applies bounds and delays to what it returns."""

    def __init__(self, target_load: float) -> None:
        self._target = target_load

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas; the present one while no replica has reported."""
        loads = (context.aggregated_metrics or {}).get(LOAD)
        if not loads:
            return context.target_num_replicas, {}
        return engines_for(loads.values(), target=self._target), {}
