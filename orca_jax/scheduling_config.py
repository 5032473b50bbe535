"""What the scheduler does beyond Algorithm 1, checked on construction."""

from dataclasses import dataclass
from typing import Literal, get_args

from orca_jax.checks import check_choice, check_flag, check_seconds, check_whole
from orca_jax.errors import ConfigError

# orca: Algorithm 1 and nothing else. default: with the extensions that the other fields turn on.
PolicyName = Literal["default", "orca"]
# full: slots for the longest possible output, as in Algorithm 1. on-demand: block by block.
Reservation = Literal["full", "on-demand"]
# How waiting requests are ordered.
QueueOrder = Literal["fcfs", "priority", "fair", "longest-prefix"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingConfig:
    """What the scheduler does beyond Algorithm 1 (docs/scheduling.md).

    `chunked_prefill` splits a prompt over iterations to fill the batches of running requests; an iteration
    that delays them has at most `prefill_tokens` prompt tokens (None: no limit but `max_batch_tokens`).
    `prefix_caching` reuses the keys and values of earlier prompts. With the reservation "on-demand" a request
    grows block by block, and may be preempted and computed again.

    `order` is the order of waiting requests. With "priority", one level of priority counts as much as
    `aging_seconds` of waiting. With "fair", owners get equal shares of the tokens. With "longest-prefix", of
    the first few by arrival those with the longest cached beginning go first.
    """

    policy: PolicyName = "default"
    chunked_prefill: bool = True
    prefill_tokens: int | None = None
    prefix_caching: bool = True
    reservation: Reservation = "on-demand"
    order: QueueOrder = "fcfs"
    aging_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, get_args(PolicyName))
        check_choice("reservation", self.reservation, get_args(Reservation))
        check_choice("scheduling_policy", self.order, get_args(QueueOrder))
        check_flag("chunked_prefill", self.chunked_prefill)
        check_flag("prefix_caching", self.prefix_caching)
        check_seconds("aging_seconds", self.aging_seconds)
        if self.prefill_tokens is not None:
            check_whole("prefill_tokens", self.prefill_tokens, 1, 1 << 20)
        if self.policy == "orca":
            self._refuse("policy 'orca' is Algorithm 1 and nothing else", order=True)
        if self.order == "longest-prefix" and not self.prefix_caching:
            message = "scheduling_policy 'longest-prefix' orders requests by the prefix cache"
            raise ConfigError(f"{message}; leave it out, or prefix_caching=False")

    @property
    def on_demand(self) -> bool:
        """Whether requests grow block by block."""
        return self.reservation == "on-demand"

    def check_deterministic(self) -> None:
        """Raises ConfigError for what makes an output's bits depend on other requests."""
        self._refuse("deterministic computes each prompt whole and once", order=False)

    def _refuse(self, why: str, *, order: bool) -> None:
        asked = {
            "chunked_prefill": self.chunked_prefill,
            "prefill_tokens": self.prefill_tokens is not None,
            "prefix_caching": self.prefix_caching,
            "reservation 'on-demand'": self.on_demand,
            f"scheduling_policy {self.order!r}": order and self.order != "fcfs",
        }
        refused = [name for name, is_asked in asked.items() if is_asked]
        if refused:
            raise ConfigError(f"{why}, so it excludes {', '.join(refused)}; leave one of the two out")


# Algorithm 1 and nothing else.
ORCA = SchedulingConfig(policy="orca", chunked_prefill=False, prefix_caching=False, reservation="full")
