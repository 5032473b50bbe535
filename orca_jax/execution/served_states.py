"""The states of a served model, as the worker of a head that drafts for it finds them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from orca_jax.execution.stage_programs import HeadInput
from orca_jax.iteration.shape import EngineShape


def states_shape(width: int, served: EngineShape, n_devices: int) -> tuple[int, ...]:
    """The shape [n_blocks, n, B, s] of an engine's kept states: each of n devices has a share of each."""
    return served.n_blocks, n_devices, served.block_size, width // n_devices


class ServedStates:
    """A head's way to the states in the served model's cache.

    `of_block` [the head's n_blocks] int32 is kept by the head's engine: for each block of the head's cache
    the served model's block with the same tokens. `shape` (`states_shape`) and `stored` are those of the
    states' array, which `read` returns; until the served model's worker is there, it is None. `place` and
    `of_states` are the shardings of the head's worker.
    """

    def __init__(
        self,
        of_block: npt.NDArray[np.int32],
        shape: tuple[int, ...],
        stored: Any,
        *,
        place: jax.sharding.Sharding,
        of_states: jax.sharding.Sharding,
    ) -> None:
        self.read: Callable[[], jax.Array] | None = None
        self.of_block, self._place = of_block, place
        self._states: Any = jax.ShapeDtypeStruct(shape, stored, sharding=of_states)

    def input(self, last_token: jax.Array) -> HeadInput:
        """The input of an iteration that is started now."""
        assert self.read is not None, "the served model's worker comes before its first request"
        # A copy: on a CPU the device may read the host's array later, where it lies.
        of_block = jax.device_put(self.of_block.copy(), self._place)
        return HeadInput(last_token, self.read(), of_block)

    def like(self, last_token: Any) -> HeadInput:
        """The shapes, dtypes and shardings of `input`."""
        of_block: Any = jax.ShapeDtypeStruct(self.of_block.shape, jnp.int32, sharding=self._place)
        return HeadInput(last_token, self._states, of_block)
