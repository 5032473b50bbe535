"""Policies choose the rows of the next iteration; the scheduler's loop is the same for all of them."""

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
        """Choose the rows, and return them with the new `n_rsrv` (Algorithm 1, line 4). Changes nothing.

        `pool` is in arrival order. A RUNNING request may be chosen only if it is in `ahead`. A row computes
        between one and all of its request's `n_to_compute` tokens. The waiting requests chosen must be the
        oldest waiting ones, in their order.
        """
        ...


@dataclass(frozen=True, slots=True)
class OrcaPolicy:
    """Algorithm 1: first come, first served, with each prompt in a single iteration."""

    max_bs: int
    n_slots: int
    max_batch_tokens: int
    block_size: int

    @classmethod
    def of(cls, config: ServingConfig) -> "OrcaPolicy":
        return cls(config.max_batch_size, config.n_slots, config.max_batch_tokens, config.block_size)

    def choose(
        self, pool: Iterable[Request], n_rsrv: int, ahead: Collection[Request]
    ) -> tuple[list[Row], int]:
        return select_rows(
            pool,
            n_rsrv,
            max_bs=self.max_bs,
            n_slots=self.n_slots,
            max_batch_tokens=self.max_batch_tokens,
            block_size=self.block_size,
            ahead=ahead,
        )
