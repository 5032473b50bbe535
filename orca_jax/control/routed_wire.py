"""The experts that rows' tokens chose, as bytes of TOKENS and DONE: row by row, [input_length, layers, k]."""

from collections.abc import Mapping, Sequence

import numpy as np

from orca_jax.errors import BadFrame
from orca_jax.request.routed_experts import ExpertIds, Routing


def encode_routed(
    routed: Mapping[int, ExpertIds], rows: Sequence[tuple[int, int]], routing: Routing
) -> bytes:
    """One stage's, of these rows: places in the batch with their numbers of tokens. Empty for a stage without
    experts.
    """
    if not routed:
        return b""
    return b"".join([routed[place].astype(routing.dtype, copy=False).tobytes() for place, _ in rows])


def decode_routed(data: bytes, rows: Sequence[tuple[int, int]], routing: Routing) -> dict[int, ExpertIds]:
    """One stage's, whose number of layers follows from the length. Raises BadFrame."""
    n_tokens = sum(n for _, n in rows)
    layer_bytes = n_tokens * routing.top_k * routing.dtype.itemsize
    n_layers, rest = divmod(len(data), layer_bytes) if layer_bytes else (0, len(data))
    if rest or n_layers > routing.n_layers:
        raise BadFrame(
            f"the experts of {n_tokens} tokens have {len(data)} bytes; they need {layer_bytes} for each "
            f"of up to {routing.n_layers} layers"
        )
    ids = np.frombuffer(data, routing.dtype)
    if ids.size and ids.max() >= routing.n_experts:
        raise BadFrame(f"an expert is {ids.max()}; there are 0 to {routing.n_experts - 1}")
    routed, start = dict[int, ExpertIds](), 0
    for place, n in rows:
        size = n * n_layers * routing.top_k
        routed[place] = ids[start : start + size].reshape(n, n_layers, routing.top_k)
        start += size
    return routed


def join_stages(
    stages: Sequence[Mapping[int, ExpertIds]], rows: Sequence[tuple[int, int]], routing: Routing
) -> dict[int, ExpertIds]:
    """All stages' experts of these rows, first to last. Raises BadFrame unless there are all layers'."""
    routed = {place: np.concatenate([stage[place] for stage in stages], axis=1) for place, _ in rows}
    for ids in routed.values():
        if ids.shape[1] != routing.n_layers:
            raise BadFrame(
                f"the stages told of {ids.shape[1]} layers with experts; there are {routing.n_layers}"
            )
    return routed
