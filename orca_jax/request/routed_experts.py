"""The experts that a request's tokens chose, for trainers that replay the routing."""

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
        """The smallest dtype that holds an expert's id."""
        return np.dtype("<u1" if self.n_experts <= 1 << 8 else "<u2")

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's ids."""
        return self.n_layers * self.top_k * self.dtype.itemsize


NO_ROUTING = Routing(0, 0, 0)


class RoutedTokens:
    """The experts that iterations have returned for a request's tokens so far, in order.

    A token that is computed again, after a preemption or a loss, keeps the experts that it had first, because
    the tokens after it were sampled with these.
    """

    def __init__(self) -> None:
        self.n_tokens = 0
        self._parts: list[ExpertIds] = []

    def add(self, first: int, ids: ExpertIds) -> None:
        """Add the experts of the tokens from `first` on."""
        n_known = self.n_tokens - first
        assert n_known >= 0, f"token {self.n_tokens} was not computed before token {first}"
        if n_known < len(ids):
            self._parts.append(ids[n_known:])
            self.n_tokens = first + len(ids)

    def until(self, n_tokens: int) -> ExpertIds | None:
        """The experts of the first `n_tokens` tokens, or of all if there are fewer; None without any."""
        return np.concatenate(self._parts)[:n_tokens] if self._parts else None


class EncodedIds(TypedDict):
    """An array as text: base64 of its little-endian elements, in order."""

    data: str
    dtype: str
    shape: Sequence[int]


def as_base64(ids: ExpertIds) -> EncodedIds:
    """Encode the ids for JSON."""
    little = ids.astype(ids.dtype.newbyteorder("<"), copy=False)
    return {
        "data": base64.b64encode(little.tobytes()).decode("ascii"),
        "dtype": ids.dtype.name,
        "shape": list(ids.shape),
    }
