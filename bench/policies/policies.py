"""The compared policies, each with the options that select it."""

from collections.abc import Mapping
from dataclasses import replace

from orca_jax.config import Sizes

BASELINE = "request-level"
# Each extension alone on top of Algorithm 1, then all of them.
_NONE = Sizes(chunked_prefill=False, prefix_caching=False, reservation="full")
POLICIES: Mapping[str, Sizes] = {
    BASELINE: Sizes(policy="orca"),  # has its own scheduler (bench/paper/request_level.py)
    "orca": Sizes(policy="orca"),
    "orca + on-demand": replace(_NONE, reservation="on-demand"),
    "orca + chunked": replace(_NONE, chunked_prefill=True),
    "orca + prefix cache": replace(_NONE, prefix_caching=True),
    "all": Sizes(),
    "all, fair": Sizes(scheduling_policy="fair"),
}
