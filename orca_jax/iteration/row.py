"""A row: one request's part in an iteration."""

from collections.abc import Sequence

from orca_jax.request.request import Request, RequestState

# A request and the number n of tokens to compute for it: `n_computed` to `n_computed + n` of its prompt and
# output. If they include the last known token, the row samples the next one. A plain tuple, because every
# request in every iteration makes one, and a NamedTuple takes seven times as long to create.
Row = tuple[Request, int]

_RUNNING, _INCREMENT = RequestState.RUNNING, RequestState.INCREMENT


def begin(rows: Sequence[Row]) -> tuple[list[int], list[Request]]:
    """Record that an iteration over these rows is issued (Algorithm 1, line 7).

    Returns the places of the rows that sample no token, and the requests that have reached `full_at`. One
    loop over all rows, because a call for each would take twice as long.
    """
    partial: list[int] = []
    full: list[Request] = []
    for i, (req, n_tokens) in enumerate(rows):
        n_in_flight = req.n_in_flight
        # Request.in_initiation, inlined for speed: an increment always samples.
        if req.state is not _INCREMENT and n_in_flight == req.n_partial and n_tokens < req.n_to_compute:
            partial.append(i)
            req.n_partial += 1
        req.n_iterations += 1
        req.n_in_flight = n_in_flight + 1
        req.state = _RUNNING
        req.n_computed = n_computed = req.n_computed + n_tokens
        if n_computed >= req.full_at:
            full.append(req)
    return partial, full
