"""What an iteration sampled, as bytes: the tokens, then the records of log-probabilities that were asked for.

The control message says which those are, so no lengths are sent: both sides know them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orca_jax.errors import BadFrame
from orca_jax.iteration.message import ControlMessage
from orca_jax.request.sampled import LOGPROBS, Sampled


class Asked(NamedTuple):
    """What an iteration was asked for."""

    n_rows: int
    logprobs: npt.NDArray[np.intp]  # places in the batch that want their token's
    prompts: tuple[tuple[int, int], ...]  # those that want their prompt's, and its tokens but the first

    @property
    def n_records(self) -> int:
        """Records behind the tokens."""
        return len(self.logprobs) + sum(n for _, n in self.prompts)


def asked(message: ControlMessage) -> Asked:
    """What the iteration of this message is asked for."""
    wants = message.sampling["prompt_logprobs"] >= 0
    prompts = tuple((int(i), int(message.n_prompt[i]) - 1) for i in np.flatnonzero(wants))
    return Asked(len(message.row), np.flatnonzero(message.sampling["logprobs"] >= 0), prompts)


def encode_sampled(sampled: Sampled, asked: Asked) -> bytes:
    """The payload of a TOKENS frame; what is behind the batch's rows is padding and cut off."""
    parts = [sampled.token_ids[: asked.n_rows].astype("<i4", copy=False).tobytes()]
    if len(asked.logprobs):
        assert sampled.logprobs is not None
        parts.append(sampled.logprobs[asked.logprobs].tobytes())
    parts += [sampled.prompt_logprobs[place][:n].tobytes() for place, n in asked.prompts]
    return b"".join(parts)


def decode_sampled(payload: bytes, asked: Asked, *, vocab_size: int) -> Sampled:
    """What these bytes are. Raises BadFrame for another length, or a token that is not in the vocabulary."""
    n = asked.n_rows
    needed = 4 * n + LOGPROBS.itemsize * asked.n_records
    if len(payload) != needed:
        raise BadFrame(f"{len(payload)} bytes of tokens came for {n} requests, which need {needed}")
    token_ids = np.frombuffer(payload, "<i4", n).astype(np.int32, copy=False)
    records = np.frombuffer(payload, LOGPROBS, asked.n_records, 4 * n)
    for ids in (token_ids, records["token_id"], records["top_ids"]):
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise BadFrame(f"token id {wrong} came; the vocabulary has 0 to {vocab_size - 1}")
    start = len(asked.logprobs)
    logprobs = None
    if start:
        logprobs = np.zeros(n, LOGPROBS)
        logprobs[asked.logprobs] = records[:start]
    prompts = dict[int, npt.NDArray[np.void]]()
    for place, n_records in asked.prompts:
        prompts[place] = records[start : start + n_records]
        start += n_records
    return Sampled(token_ids, logprobs, prompts)
