"""The experts that the tokens of a request chose, as those who train replay them."""

import base64
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

ExpertIds = npt.NDArray[np.unsignedinteger]  # [tokens, sparse layers, k], uint8 or uint16


class Routing(NamedTuple):
    """A token chooses `top_k` of `n_experts` experts in each of `n_layers` sparse layers."""

    n_layers: int
    top_k: int
    n_experts: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The smallest that holds an expert's id."""
        return np.dtype("<u1" if self.n_experts <= 1 << 8 else "<u2")

    @property
    def token_bytes(self) -> int:
        """Of one token's ids."""
        return self.n_layers * self.top_k * self.dtype.itemsize


NO_ROUTING = Routing(0, 0, 0)


class RoutedTokens:
    """What iterations told of a request's tokens so far: of each token once, in order.

    A token that is computed again, after a preemption or a loss, keeps the experts that it had first: the
    tokens after it were sampled with these.
    """

    def __init__(self) -> None:
        self.n_tokens = 0
        self._parts: list[ExpertIds] = []

    def add(self, first: int, ids: ExpertIds) -> None:
        """Take the experts of the tokens from `first` on."""
        n_known = self.n_tokens - first
        assert n_known >= 0, f"token {self.n_tokens} was not computed before token {first}"
        if n_known < len(ids):
            self._parts.append(ids[n_known:])
            self.n_tokens = first + len(ids)

    def until(self, n_tokens: int) -> ExpertIds | None:
        """Those of the first `n_tokens` tokens, or of all if there are fewer; None before there are any."""
        return np.concatenate(self._parts)[:n_tokens] if self._parts else None


class EncodedIds(TypedDict):
    """An array as text: base64 of its little-endian elements, in order."""

    data: str
    dtype: str
    shape: Sequence[int]


def as_base64(ids: ExpertIds) -> EncodedIds:
    """The ids as they are told in JSON."""
    little = ids.astype(ids.dtype.newbyteorder("<"), copy=False)
    return {
        "data": base64.b64encode(little.tobytes()).decode("ascii"),
        "dtype": ids.dtype.name,
        "shape": list(ids.shape),
    }
