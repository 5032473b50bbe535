"""Embeddings: a prompt's pooled hidden states, and the vector that a client gets."""

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


def embedding(vector: Vector, *, dimensions: int | None = None, normalize: bool = True) -> Vector:
    """Cut a pooled vector to `dimensions` numbers (default: all), and scale it to length 1 if `normalize`."""
    cut = vector[:dimensions]
    if not normalize:
        return cut
    length = float(np.linalg.norm(cut.astype(np.float64)))
    return cut if length == 0 else (cut / length).astype(np.float32)
