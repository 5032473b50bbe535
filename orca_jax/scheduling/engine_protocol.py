"""What a scheduler needs of an engine: iterations go in, tokens come back."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from orca_jax.request.request import Request
from orca_jax.request.sampled import TokenLogprobs

NOTHING: Mapping[int, Any] = MappingProxyType({})


def never() -> bool:
    """What interrupts a wait beside which nothing can be issued."""
    return False


class Returned(NamedTuple):
    """A batch whose iteration is done, and what it computed for each request, `[len(batch)]`.

    Log-probabilities by place in the batch, where a request asked for them.
    """

    batch: Sequence[Request]
    token_ids: Sequence[int] | npt.NDArray[np.int32]
    logprobs: Mapping[int, TokenLogprobs] = NOTHING
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = NOTHING


class Engine(Protocol):
    """Runs iterations, in flight up to one more than `n_workers`, and returns them in the order of issue.

    Both methods raise EngineError; nothing is in flight any more then.
    """

    @property
    def n_workers(self) -> int:
        """Inter-layer partitions: how many batches keep all of them busy."""
        ...

    @property
    def keeps_tokens(self) -> bool:
        """Whether a request may be issued again before its token has come back: the device has it."""
        ...

    def issue(self, batch: Sequence[Request]) -> None:
        """Start one iteration of the model for `batch`, without waiting for a device.

        A request's state is still what it was, and its row and blocks are reserved. One that is RUNNING
        continues the token that the device has.
        """
        ...

    def wait(self, interrupted: Callable[[], bool]) -> Returned | None:
        """Wait for the oldest issued batch; None if `interrupted` turned true before it was done.

        Where that is `never`, no look at it is needed.
        """
        ...
