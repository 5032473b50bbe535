"""What an iteration sampled, as the payload of TOKENS: tokens, and the log-probabilities that were asked for.

The control message says which those are, so both sides know how many records come.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.control import worker_pb2
from orca_jax.errors import BadFrame
from orca_jax.iteration.message import ControlMessage
from orca_jax.request.sampled import LOGPROBS, Sampled


class Asked(NamedTuple):
    """What an iteration was asked for."""

    n_rows: int
    logprobs: npt.NDArray[np.intp]  # places in the batch that want their token's
    prompts: tuple[tuple[int, int], ...]  # those that want their prompt's, and of how many of its tokens


def asked(message: ControlMessage) -> Asked:
    """What the iteration of this message is asked for."""
    n_scored = message.n_scored
    wants = np.flatnonzero(message.sampling["prompt_logprobs"] >= 0)
    prompts = tuple((int(i), int(n_scored[i])) for i in wants)
    return Asked(len(message.row), np.flatnonzero(message.sampling["logprobs"] >= 0), prompts)


def encode_sampled(sampled: Sampled, asked: Asked) -> worker_pb2.Tokens:
    """What was sampled as a payload, without the padding after the batch's rows."""
    payload = worker_pb2.Tokens(
        token_ids=sampled.token_ids[: asked.n_rows].astype("<i4", copy=False).tobytes()
    )
    if len(asked.logprobs):
        assert sampled.logprobs is not None
        payload.logprobs = sampled.logprobs[asked.logprobs].tobytes()
    if asked.prompts:
        parts = [sampled.prompt_logprobs[place][:n].tobytes() for place, n in asked.prompts]
        payload.prompt_logprobs = b"".join(parts)
    return payload


def decode_sampled(payload: worker_pb2.Tokens, asked: Asked, *, vocab_size: int) -> Sampled:
    """What this payload is. Raises BadFrame for another length, or a token that is not in the vocabulary."""
    n = asked.n_rows
    token_ids = _exactly(payload.token_ids, np.dtype("<i4"), n, "tokens", n).astype(np.int32, copy=False)
    records = _exactly(payload.logprobs, LOGPROBS, len(asked.logprobs), "log-probabilities", n)
    n_prompt = sum(n for _, n in asked.prompts)
    prompt_records = _exactly(payload.prompt_logprobs, LOGPROBS, n_prompt, "prompts' log-probabilities", n)
    _check_ids(token_ids, vocab_size)
    for of in (records, prompt_records):
        _check_ids(of["token_id"], vocab_size)
        _check_ids(of["top_ids"], vocab_size)
    logprobs = None
    if len(records):
        logprobs = np.zeros(n, LOGPROBS)
        logprobs[asked.logprobs] = records
    prompts, start = dict[int, npt.NDArray[np.void]](), 0
    for place, n_records in asked.prompts:
        prompts[place] = prompt_records[start : start + n_records]
        start += n_records
    return Sampled(token_ids, logprobs, prompts)


def _exactly(data: bytes, dtype: np.dtype, count: int, what: str, n_rows: int) -> npt.NDArray:
    needed = dtype.itemsize * count
    if len(data) != needed:
        raise BadFrame(f"{len(data)} bytes of {what} came for {n_rows} requests, which need {needed}")
    return np.frombuffer(data, dtype, count)


def _check_ids(ids: npt.NDArray[np.int32], vocab_size: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise BadFrame(f"token id {wrong} came; the vocabulary has 0 to {vocab_size - 1}")
