"""Embeddings: the pooling of a prompt's hidden states into one vector, and the sizes it may have."""

from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from orca_jax.errors import InvalidRequest

Vector = npt.NDArray[np.float32]

# last: the hidden state of the last token. mean: the mean over all tokens.
Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


def checked_pooling(pooling: object) -> Pooling:
    """Return `pooling` if it is a known one. Raises InvalidRequest."""
    if pooling not in POOLINGS:
        raise InvalidRequest(f"pooling is {str(pooling)[:100]!r}; it must be last or mean", param="pooling")
    return cast(Pooling, pooling)


def check_dimensions(dimensions: object, size: int) -> None:
    """Raise InvalidRequest if an embedding of `size` numbers cannot be cut to `dimensions` of them."""
    if dimensions is None:
        return
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= size:
        message = f"dimensions is {str(dimensions)[:100]}; it must be from 1 to {size}, the model's size"
        raise InvalidRequest(message, param="dimensions")


def embedding(vector: Vector, *, dimensions: int | None = None, normalize: bool = True) -> Vector:
    """Cut a pooled vector to `dimensions` numbers (default: all), and scale it to length 1 if `normalize`."""
    cut = vector[:dimensions]
    if not normalize:
        return cut
    length = float(np.linalg.norm(cut.astype(np.float64)))
    return cut if length == 0 else (cut / length).astype(np.float32)
