# pyright: standard
"""New weights for a module that a user wrote, by their paths in it, wherever its stages run."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from orca_jax.checkpoint import orbax
from orca_jax.checkpoint.module_weights import find_module_weights
from orca_jax.checkpoint.shard_reader import Plane, put, read_whole
from orca_jax.config import Layout
from orca_jax.errors import ConfigError
from orca_jax.launch.new_weights import check_module_arrays, named_arrays
from orca_jax.sharding.pieces import moved
from orca_jax.user_model.decoder import ModuleShapes


class ModuleWeights:
    """The weights of a module that a user wrote: new ones must have the same shapes and dtypes."""

    def __init__(self, shapes: ModuleShapes) -> None:
        self._held, self._optional = shapes.held, shapes.optional

    def found(self, directory: Path) -> dict[str, Plane]:
        """The arrays of a checkpoint, if they fit. Raises a CheckpointError."""
        shapes = {name: held.shape for name, held in self._held.items()}
        return find_module_weights(directory, shapes, self._optional)

    def read_ahead(self, planes: Mapping[str, Plane]) -> dict[str, Plane]:
        """Read arrays whole into host memory. Raises a CheckpointError."""
        return {
            name: read_whole(plane, self._held[name].shape, np.dtype(self._held[name].dtype))
            for name, plane in planes.items()
        }

    def read(
        self, planes: Mapping[str, Plane], name: str, places: Sequence[jax.sharding.Sharding]
    ) -> Iterator[jax.Array]:
        """Read an array onto each place, in the dtype that the engine holds."""
        held = self._held[name]
        return iter(put(planes[name], held.shape, np.dtype(held.dtype), places))

    def checked(self, weights: object, *, cast: bool, layout: Layout | None = None) -> dict[str, Any]:
        """The arrays by name, if they fit. Raises ConfigError for a layout, and TensorMismatch."""
        if layout is not None:
            raise ConfigError("layout is for models of a family; leave it out for a model of your own")
        arrays = named_arrays(weights)
        return check_module_arrays(arrays, self._held, optional=self._optional, cast=cast)

    def write(self, directory: Path, arrays: Mapping[str, Any]) -> None:
        """Write checked arrays as a checkpoint for `found`, one at a time. Raises ConfigError."""
        try:
            orbax.write(
                directory, arrays, lambda name: np.asarray(arrays[name]).astype(self._held[name].dtype)
            )
        except OSError as error:
            raise ConfigError(
                f"the new weights cannot be written to {directory}: {error.strerror}"
            ) from error

    def placed(
        self, arrays: Mapping[str, Any], name: str, places: Sequence[jax.sharding.Sharding]
    ) -> Iterator[jax.Array]:
        """A copy in each place, in the dtype that the engine holds."""
        return (moved(arrays[name], place, self._held[name].dtype) for place in places)
