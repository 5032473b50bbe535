"""What the scheduler does beyond Algorithm 1: the options, and the configuration that follows from them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from orca_jax.checks import Whole, check_place, check_seconds
from orca_jax.errors import ConfigError
from orca_jax.options import Options, Or

# default: with the extensions that the other fields turn on. Others are the names of users' classes.
PolicyName = Literal["default", "orca"]
# full: slots for the longest possible output, as in Algorithm 1. on-demand: block by block.
Reservation = Literal["full", "on-demand"]
# How waiting requests are ordered.
QueueOrder = Literal["fcfs", "priority", "fair", "longest-prefix"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)  # only a base: quicker to make
class SchedulingOptions(Options):
    """The scheduler's options (docs/scheduling.md). None: on, except where another option excludes it."""

    policy: Annotated[
        PolicyName | str,
        "which requests run next; orca: Algorithm 1 of the paper and nothing else, which excludes the flags "
        "below; package.file:Class: a policy of your own (docs/scheduling.md)",
        *(Or("package.file:Class"), check_place),
    ] = "default"
    chunked_prefill: Annotated[
        bool | None,
        "split long prompts over iterations, so that they do not delay others (default: on)",
    ] = None
    prefill_tokens: Annotated[
        int | None,
        "maximum number of prompt tokens in an iteration that delays others (default: from the device)",
        Whole(1, 1 << 20),
    ] = None
    prefix_caching: Annotated[
        bool | None, "reuse the keys and values of prompts that begin alike (default: on)"
    ] = None
    reservation: Annotated[
        Reservation | None,
        "full: keep room in the KV cache for the longest possible output; on-demand: block by block, and "
        "preempt the latest request if none is left (default: on-demand)",
    ] = None
    scheduling_policy: Annotated[
        QueueOrder,
        "order of waiting requests: by arrival, by `priority` (lower first), equal shares of the tokens for "
        "each API key, or among the first 16 the longest cached beginning first",
    ] = "fcfs"


@dataclass(frozen=True, kw_only=True)
class SchedulingConfig(SchedulingOptions):
    """The scheduler's options, none of them open.

    With the scheduling policy "priority", one level of priority counts as much as `aging_seconds` of waiting.
    """

    chunked_prefill: bool = True
    prefix_caching: bool = True
    reservation: Reservation = "on-demand"
    aging_seconds: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("aging_seconds", self.aging_seconds)
        if self.policy == "orca":
            self._refuse("policy 'orca' is Algorithm 1 and nothing else", order=True)
        if self.scheduling_policy == "longest-prefix" and not self.prefix_caching:
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
            f"scheduling_policy {self.scheduling_policy!r}": order and self.scheduling_policy != "fcfs",
        }
        refused = [name for name, is_asked in asked.items() if is_asked]
        if refused:
            raise ConfigError(f"{why}, so it excludes {', '.join(refused)}; leave one of the two out")


# Algorithm 1 and nothing else.
ORCA = SchedulingConfig(policy="orca", chunked_prefill=False, prefix_caching=False, reservation="full")
