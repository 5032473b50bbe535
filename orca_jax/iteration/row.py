"""A row: one request's part in an iteration."""

from orca_jax.request.request import Request

# A request, and how many of its next tokens are computed: `n_computed` to `n_computed + n` of its prompt and
# output. Where they reach the end of what is known, the row samples a token. A plain tuple, because one is
# made for every request of every iteration, and a NamedTuple takes seven times as long to make.
Row = tuple[Request, int]
