"""Reads weights of recurrent layers with their rows in the order of devices (parameters.share_rows).

Readers of checkpoints know only a checkpoint's order. Here what they found is reordered, whatever the format
and the weight's form: each device's rows are a few runs of a checkpoint's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from orca_jax.checkpoint.shard_reader import Box, Plane, Source
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import parameter_table, runs_of, share_rows


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """The rows `rows` of a plane whose first axis has `n_stored` rows."""

    plane: Plane
    rows: tuple[int, ...]
    n_stored: int

    @property
    def divisible(self) -> bool:
        return self.plane.divisible

    def n_bytes(self, shape: tuple[int, ...], box: Box) -> int:
        """The bytes on disk of the part `box`."""
        stored = (self.n_stored, *shape[1:])
        return sum(self.plane.n_bytes(stored, part) for _, part in self._parts(box))

    def read(self, shape: tuple[int, ...], dtype: np.dtype, box: Box) -> np.ndarray:
        """Read the part `box`, run by run, or once where a part costs as much as the whole."""
        stored = (self.n_stored, *shape[1:])
        if not self.divisible:
            whole = self.plane.read(stored, dtype, ((0, self.n_stored), *box[1:]))
            return whole[np.array(self.rows[slice(*box[0])], int)]
        out = np.empty([end - first for first, end in box], dtype)
        for at, part in self._parts(box):
            out[at : at + part[0][1] - part[0][0]] = self.plane.read(stored, dtype, part)
        return out

    def _parts(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield runs of stored rows: the row within the box, and the run's part of the plane."""
        for at, first, n in runs_of(self.rows[slice(*box[0])]):
            yield at, ((first, first + n), *box[1:])


def in_order_of_shares(
    sources: Mapping[str, Source], stored: ModelConfig, model: ModelConfig
) -> dict[str, Source]:
    """Reorder what a reader found for `stored`, whose rows are a checkpoint's, for `model`."""
    before, after = parameter_table(stored), parameter_table(model)
    found = dict(sources)
    for name, source in sources.items():
        rows = share_rows(model, name)
        if rows is None:
            continue
        n_stored = before[name].shape[0]
        if isinstance(source, Mapping):
            # An array without the axis of rows, such as the order of inputs, is the same for all.
            arrays = after[name].held_arrays(np.float32)
            found[name] = {
                plane: OrderedRows(one, rows, n_stored) if arrays[plane].axes[0] == 0 else one
                for plane, one in source.items()
            }
        else:
            found[name] = OrderedRows(source, rows, n_stored)
    return found
