"""Plain rows: a chunk of a prompt, whose tokens the host knows, or a request's newest sampled token.

The constants of a row are stored once, when a request starts in it, so that the many rows of a decode enter
the message as a few NumPy gathers, whatever their number.
"""

from collections.abc import Sequence
from operator import attrgetter
from struct import pack
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from orca_jax.iteration.message import ADJUSTED, POOLED, ROUTED, neutral_sampling
from orca_jax.iteration.rows.pooled import FLAG_OF
from orca_jax.request.request import Request

# The fields that message.SAMPLING copies from SamplingParams, in its order.
_copied_fields = attrgetter(
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "top_k"
)
_NOT_POOLED = ~np.uint8(POOLED)
_Integer = TypeVar("_Integer", np.int32, np.intp)


class PlainRows:
    """The engine master's copy of each row's constants; all arrays are [n_rows].

    A request starts in a row when the row is newly reserved, or when `n_computed` differs from its value
    after the row's last iteration, as after a loss. `n_reserved` counts the reservations of each row
    (KVManager.n_reserved), which distinguishes successive requests in it.
    """

    def __init__(self, n_reserved: npt.NDArray[np.int64]) -> None:
        n_rows = len(n_reserved)
        self._n_reserved_now = n_reserved
        self._n_reserved = np.zeros(n_rows, np.int64)
        self.sampling = neutral_sampling(n_rows)
        self.n_prompt = np.zeros(n_rows, np.int32)
        self.has_constraint = np.zeros(n_rows, np.bool_)
        self.has_sampled = np.zeros(n_rows, np.bool_)  # the row's initiation is over
        self.kv_length = np.zeros(n_rows, np.int32)  # tokens in the cache after all issued iterations
        self.adapter = np.zeros(n_rows, np.int32)  # 0 for none, or 1 + the adapter's slot
        self.has_adapters = False  # whether any request ever had one
        self._reads_prompts = False  # whether any request ever asked to score or pool its prompt

    def begin(
        self,
        requests: Sequence[Request],
        row: npt.NDArray[np.intp],
        n_computed: npt.NDArray[np.int32],
        increments: npt.NDArray[np.intp],
    ) -> None:
        """Store the constants of the rows [R] in which a request starts.

        `increments` are the indices of rows that go on, although drafts before them may have been rejected.
        """
        starts = self.kv_length.take(row) != n_computed
        starts[increments] = False
        starts |= self._n_reserved.take(row) != self._n_reserved_now.take(row)
        for i in starts.nonzero()[0].tolist():
            self._store(requests[i], int(row[i]))

    def end_initiation(self, row: npt.NDArray[np.intp]) -> None:
        """Note that these rows continue with increments, which neither score nor pool the prompt."""
        self.has_sampled[row] = True
        if self._reads_prompts:
            self.sampling["prompt_logprobs"][row] = -1
            self.sampling["flags"][row] &= _NOT_POOLED

    def _store(self, request: Request, row: int) -> None:
        params, kind = request.sampling, request.kind
        n_logprobs = kind.n_logprobs(request)
        n_prompt_logprobs = params.prompt_logprobs if request.prompt_logprobs is None else None
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        flags = ADJUSTED if params.logit_bias or penalties != (1, 0, 0) else 0
        flags |= ROUTED if params.return_routed_experts else 0
        self.sampling[row] = (
            request.seed,
            *_copied_fields(params),
            -1 if n_logprobs is None else n_logprobs,
            -1 if n_prompt_logprobs is None else n_prompt_logprobs,
            flags | FLAG_OF[request.pooling],
        )
        if n_prompt_logprobs is not None or request.pooling is not None:
            self._reads_prompts = True
        if kind.greedy:
            self.sampling["temperature"][row] = 0
        self._n_reserved[row] = self._n_reserved_now[row]
        self.n_prompt[row] = len(request.prompt_ids)
        self.has_constraint[row] = request.constraint is not None
        self.adapter[row] = 0 if request.adapter is None else request.adapter.slot + 1
        self.has_adapters |= request.adapter is not None
        self.has_sampled[row] = False


def packed(numbers: Sequence[int], dtype: type[_Integer]) -> npt.NDArray[_Integer]:
    """A read-only array of these numbers, in half the time that np.array takes."""
    code = "n" if dtype is np.intp else "i"
    return np.frombuffer(pack(f"{len(numbers)}{code}", *numbers), dtype)
