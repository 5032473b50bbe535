"""The results of an iteration as the payload of TOKENS: tokens, log-probabilities, hidden states, experts.

Each stage reports the experts of its own layers, in DONE or TOKENS. Both sides derive the number of records
from the iteration's control message.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.control import worker_pb2
from orca_jax.errors import BadFrame
from orca_jax.iteration.message import POOLED, ControlMessage
from orca_jax.request.routed_experts import NO_ROUTING, ExpertIds, Routing
from orca_jax.request.sampled import LOGPROBS, Sampled


class ExpectedRecords(NamedTuple):
    """The records that an iteration returns; rows are places in its batch."""

    n_rows: int
    logprobs: npt.NDArray[np.intp]  # rows that request their token's log-probabilities
    prompts: tuple[tuple[int, int], ...]  # rows that request their prompt's, each with the number of records
    pooled: tuple[int, ...] = ()  # rows that pool hidden states
    routed: tuple[tuple[int, int], ...] = ()  # rows that ask for experts, each with its input tokens


def expected_records(message: ControlMessage) -> ExpectedRecords:
    """The records that the iteration of this message returns."""
    n_scored = message.n_scored
    wants = np.flatnonzero(message.sampling["prompt_logprobs"] >= 0)
    prompts = tuple((int(i), int(n_scored[i])) for i in wants)
    logprobs = np.flatnonzero(message.sampling["logprobs"] >= 0)
    pooled = tuple(np.flatnonzero(message.sampling["flags"] & POOLED).tolist())
    return ExpectedRecords(len(message.row), logprobs, prompts, pooled, tuple(message.routed_rows))


def encode_sampled(
    sampled: Sampled, expected: ExpectedRecords, routing: Routing = NO_ROUTING
) -> worker_pb2.Tokens:
    """Encode the payload of TOKENS, without the padding after the batch's rows."""
    payload = worker_pb2.Tokens(
        token_ids=sampled.token_ids[: expected.n_rows].astype("<i4", copy=False).tobytes()
    )
    if len(expected.logprobs):
        assert sampled.logprobs is not None
        payload.logprobs = sampled.logprobs[expected.logprobs].tobytes()
    if expected.prompts:
        parts = [sampled.prompt_logprobs[place][:n].tobytes() for place, n in expected.prompts]
        payload.prompt_logprobs = b"".join(parts)
    if expected.pooled:
        vectors = [sampled.pooled[place].astype("<f4", copy=False).tobytes() for place in expected.pooled]
        payload.pooled = b"".join(vectors)
    if expected.routed:
        payload.routed = encode_routed(sampled.routed, expected.routed, routing)
    return payload


def decode_sampled(
    payload: worker_pb2.Tokens, expected: ExpectedRecords, *, vocab_size: int, embedding_size: int = 0
) -> Sampled:
    """Decode the payload of TOKENS, except for `routed` (see `decode_routed`).

    Raises BadFrame for a wrong length or a token outside the vocabulary.
    """
    n = expected.n_rows
    token_ids = _exactly(payload.token_ids, np.dtype("<i4"), n, "tokens", n).astype(np.int32, copy=False)
    records = _exactly(payload.logprobs, LOGPROBS, len(expected.logprobs), "log-probabilities", n)
    n_prompt = sum(n for _, n in expected.prompts)
    prompt_records = _exactly(payload.prompt_logprobs, LOGPROBS, n_prompt, "prompt log-probabilities", n)
    _check_ids(token_ids, vocab_size)
    for checked in (records, prompt_records):
        _check_ids(checked["token_id"], vocab_size)
        _check_ids(checked["top_ids"], vocab_size)
    logprobs = None
    if len(records):
        logprobs = np.zeros(n, LOGPROBS)
        logprobs[expected.logprobs] = records
    prompts, start = dict[int, npt.NDArray[np.void]](), 0
    for place, n_records in expected.prompts:
        prompts[place] = prompt_records[start : start + n_records]
        start += n_records
    n_numbers = len(expected.pooled) * embedding_size
    numbers = _exactly(payload.pooled, np.dtype("<f4"), n_numbers, "hidden states", n)
    vectors = numbers.astype(np.float32, copy=False).reshape(len(expected.pooled), embedding_size)
    return Sampled(token_ids, logprobs, prompts, dict(zip(expected.pooled, vectors, strict=True)))


def encode_routed(
    routed: Mapping[int, ExpertIds], rows: Sequence[tuple[int, int]], routing: Routing
) -> bytes:
    """Encode the experts of one stage for these rows, each a place in the batch and its number of tokens.

    Row by row, [input_length, layers, k]; empty for a stage without experts.
    """
    if not routed:
        return b""
    return b"".join([routed[place].astype(routing.dtype, copy=False).tobytes() for place, _ in rows])


def decode_routed(data: bytes, rows: Sequence[tuple[int, int]], routing: Routing) -> dict[int, ExpertIds]:
    """Decode one stage's experts, by place in the batch; the length gives the number of layers.

    Raises BadFrame.
    """
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
    """Join the experts of all stages, first to last. Raises BadFrame unless every sparse layer has some."""
    routed = {place: np.concatenate([stage[place] for stage in stages], axis=1) for place, _ in rows}
    for ids in routed.values():
        if ids.shape[1] != routing.n_layers:
            raise BadFrame(
                f"the stages reported {ids.shape[1]} layers with experts; there are {routing.n_layers}"
            )
    return routed


def _exactly(data: bytes, dtype: np.dtype, count: int, what: str, n_rows: int) -> npt.NDArray:
    needed = dtype.itemsize * count
    if len(data) != needed:
        raise BadFrame(f"the {what} of {n_rows} requests have {len(data)} bytes; they need {needed}")
    return np.frombuffer(data, dtype, count)


def _check_ids(ids: npt.NDArray[np.int32], vocab_size: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise BadFrame(f"token id {wrong} is not in the vocabulary, which has 0 to {vocab_size - 1}")
