"""The compared policies, each with the options that select it."""

import inspect
from collections.abc import Mapping
from dataclasses import replace

from orca_jax.config import Sizes
from orca_jax.scheduling.policies import users_policy
from orca_jax.scheduling.policy import OrcaPolicy

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
    "longest prefix": Sizes(scheduling_policy="longest-prefix"),
    # The others are examples that follow papers; each also has the extensions of "all".
    "shortest remaining": Sizes(policy="examples.policies.shortest_remaining:ShortestRemaining"),
    "shortest, roughly": Sizes(policy="examples.policies.shortest_remaining:RoughlyShortestRemaining"),
    "skip-join MLFQ": Sizes(policy="examples.policies.skip_join_mlfq:SkipJoinMLFQ"),
    "first-token deadline": Sizes(policy="examples.policies.earliest_deadline:FirstTokenDeadline"),
    "token deadline": Sizes(policy="examples.policies.earliest_deadline:TokenDeadline"),
}
# What a trace from a file is played with, unless --policy names others.
COMPARED = (
    *("orca", "all", "longest prefix", "shortest remaining", "shortest, roughly", "skip-join MLFQ"),
    *("first-token deadline", "token deadline", "all, fair"),
)


def sizes_of(policy: str) -> Sizes:
    """The options of a policy by its name above, or of a user's "package.file:Class". Raises ConfigError.

    A subclass of OrcaPolicy has Algorithm 1's options, any other class those of "all".
    """
    known = POLICIES.get(policy)
    if known is not None:
        return known
    made = users_policy(policy)
    algorithm_1 = inspect.isclass(made) and issubclass(made, OrcaPolicy)
    return replace(_NONE if algorithm_1 else Sizes(), policy=policy)
