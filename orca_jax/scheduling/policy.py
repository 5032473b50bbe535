"""A policy chooses the rows of the next iteration; the scheduler's loop is the same for every one."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from orca_jax.config import ServingConfig
from orca_jax.iteration.row import Row
from orca_jax.request.request import Request
from orca_jax.scheduling.select import select_rows


class Policy(Protocol):
    """Which requests run in the next iteration, and how many tokens of each."""

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request]
    ) -> tuple[list[Row], int]:
        """The rows, and the slots that are reserved with them; changes nothing (Algorithm 1, line 4).

        `pool` is in arrival order. A request that is RUNNING may be chosen only if it is one of `ahead`. A
        row has from one to all of the `n_to_compute` tokens of its request. What is chosen without having a
        row is the front of what waits, in its order.
        """
        ...


@dataclass(frozen=True, slots=True)
class OrcaPolicy:
    """Algorithm 1: first come, first served, and always the whole prompt at once."""

    max_bs: int
    n_slots: int
    max_batch_tokens: int
    block_size: int

    @classmethod
    def of(cls, config: ServingConfig) -> "OrcaPolicy":
        """With the sizes of an engine."""
        return cls(config.max_batch_size, config.n_slots, config.max_batch_tokens, config.block_size)

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request]
    ) -> tuple[list[Row], int]:
        """Policy."""
        return select_rows(
            pool,
            n_rsrv,
            max_bs=self.max_bs,
            n_slots=self.n_slots,
            max_batch_tokens=self.max_batch_tokens,
            block_size=self.block_size,
            ahead=ahead,
        )
