"""A row: one request's part in an iteration."""

from typing import NamedTuple

from orca_jax.request.request import Request


class Row(NamedTuple):
    """Compute the next `n_tokens` tokens of a request: `n_computed` to `n_computed + n_tokens` of its prompt
    and output.

    Where they reach the end of what is known, the row samples a token. A tuple, because one is made for every
    request of every iteration.
    """

    request: Request
    n_tokens: int
