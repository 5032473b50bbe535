"""A row: one request's part in an iteration."""

from orca_jax.request.request import Request

# A request and the number n of tokens to compute for it: `n_computed` to `n_computed + n` of its prompt and
# output. If they include the last known token, the row samples the next one. A plain tuple, because every
# request in every iteration makes one, and a NamedTuple takes seven times as long to create.
Row = tuple[Request, int]
