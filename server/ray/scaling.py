"""Computes how many engines the load needs. Ray's controller asks ten times a second."""

import math
from collections.abc import Iterable
from typing import Any

from ray.serve.config import AutoscalingContext

LOAD = "orca_load"  # the name of the load that a replica reports
_ROUNDING = 1e-9  # so that three loads of 0.1 need 3 engines of 0.1, although they sum up to slightly more


def engines_for(loads: Iterable[float], *, target: float) -> int:
    """Compute the fewest engines, at least 1, among which these loads come to at most `target` each.

    A load is a fraction of one engine's capacity, and above 1 if requests wait. So the sum is what clients
    ask for, however it is spread over the engines.
    """
    return max(1, math.ceil(sum(loads) / target - _ROUNDING))


class LoadPolicy:
    """The autoscaling policy, by the load that engines report. Ray applies bounds and delays."""

    def __init__(self, target_load: float) -> None:
        self._target = target_load

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas: the present one while no replica has reported."""
        loads = (context.aggregated_metrics or {}).get(LOAD)
        if not loads:
            return context.target_num_replicas, {}
        return engines_for(loads.values(), target=self._target), {}
