"""Names and checks of embeddings' options. pooled_vector.py has their mathematics, which needs numpy."""

from typing import cast, get_args

from orca_jax.config import Pooling
from orca_jax.errors import InvalidRequest

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


def checked_pooling(pooling: object) -> Pooling:
    """Return `pooling` if it is a known one. Raises InvalidRequest."""
    if pooling not in POOLINGS:
        raise InvalidRequest(
            f"pooling is {str(pooling)[:100]!r}; it must be last, mean or cls", param="pooling"
        )
    return cast(Pooling, pooling)


def check_dimensions(dimensions: object, size: int) -> None:
    """Raise InvalidRequest if an embedding of `size` numbers cannot be cut to `dimensions` of them."""
    if dimensions is None:
        return
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= size:
        message = f"dimensions is {str(dimensions)[:100]}; it must be from 1 to {size}, the model's size"
        raise InvalidRequest(message, param="dimensions")
