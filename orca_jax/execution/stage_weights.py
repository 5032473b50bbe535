"""A stage's weights by name: replaced one by one between iterations, or kept in host memory meanwhile."""

from typing import Any

import jax
import numpy as np

from orca_jax.execution.stage import Stage


class StageWeights:
    """The weights of one stage, which its programs read. For the thread that runs the stage."""

    def __init__(self, stage: Stage) -> None:
        self._arrays: list[Any] = stage.weights
        self._places = stage.places
        self._shardings = [array.sharding for array in stage.weights]
        self._parked: dict[int, np.ndarray] = {}  # arrays that are not on the device

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def sharding(self, name: str) -> Any:
        """The weight's place on the devices: a Sharding, or a FormedWeight of such."""
        return jax.tree.map(lambda i: self._shardings[i], self._places[name])

    def copy(self, name: str) -> Any:
        """A copy of the whole weight in host memory, in its form."""
        return jax.tree.map(self._copied, self._places[name])

    def replace(self, name: str, weight: Any) -> None:
        """Put a weight into the place of another; the old one's memory is freed."""
        jax.tree.map(self._put, self._places[name], weight)

    def _copied(self, i: int) -> np.ndarray:
        return self._parked[i].copy() if i in self._parked else np.array(self._arrays[i])

    def _put(self, i: int, array: jax.Array) -> None:
        self._parked.pop(i, None)
        self._arrays[i] = array

    def park(self) -> None:
        """Move all weights to host memory, one after the other."""
        for i, array in enumerate(self._arrays):
            if i not in self._parked:
                self._parked[i] = np.array(array)
                self._arrays[i] = None

    def unpark(self) -> None:
        """Move the weights that are in host memory back to the device."""
        for i in [*self._parked]:
            value = jax.device_put(self._parked[i], self._shardings[i], may_alias=False)
            self._arrays[i] = jax.block_until_ready(value)
            del self._parked[i]
