"""The vector of an embedding, and what is returned of it."""

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


def embedding(vector: Vector, *, dimensions: int | None = None, normalize: bool = True) -> Vector:
    """The first `dimensions` numbers of a pooled vector, by default all, and of length 1 if normalized."""
    cut = vector[:dimensions]
    if not normalize:
        return cut
    length = float(np.linalg.norm(cut.astype(np.float64)))
    return cut if length == 0 else (cut / length).astype(np.float32)
