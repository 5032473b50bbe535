"""The control message: all that a worker must be told of one iteration (ORCA 4.1, Figure 8).

It travels host to host, ahead of the devices' work, and carries no activation. R is the number of
requests in the batch here, without padding; every array is one entry a request, in the batch's order.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """How each next token is chosen: temperature 0 is greedy; top_p 1 and top_k 0 keep every token."""

    temperature: npt.NDArray[np.float32]  # [R]
    top_p: npt.NDArray[np.float32]  # [R]
    top_k: npt.NDArray[np.int32]  # [R]
    seed: npt.NDArray[np.int64]  # [R]


@dataclass(frozen=True, slots=True, eq=False)
class ControlMessage:
    """One iteration's requests.

    `token_index` counts the output tokens before the one that this iteration samples; with the seed it makes
    the key, so that a request's tokens don't depend on its neighbours. A request's input tokens are the last
    `input_length` of its `kv_length` ones. Where `token_on_device` stands, the one input token is in the
    device's `last_token[row]`, and 0 in `token_ids`.
    """

    iteration: int
    row: npt.NDArray[np.int32]  # [R] place in the block table and in last_token
    initiation: npt.NDArray[np.bool_]  # [R]
    token_index: npt.NDArray[np.int32]  # [R]
    input_length: npt.NDArray[np.int32]  # [R] tokens that go in
    kv_length: npt.NDArray[np.int32]  # [R] tokens in the cache after these were written
    token_ids: npt.NDArray[np.int32]  # [sum of input_length] request by request
    token_on_device: npt.NDArray[np.bool_]  # [R]
    block_table: npt.NDArray[np.int32]  # [R, max_blocks]
    sampling: SamplingRows
