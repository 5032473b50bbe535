"""The experts that tokens chose in a stage's layers, from the forward pass to the host.

Every forward pass of a mixture of experts returns them: a few bytes per token, which stay on the device
unless a row asks for them. In the forward pass the model's last layer runs each row's last token alone; the
other tokens of rows that ask pass through it again (execution/prompt_reads.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from orca_jax.iteration.message import ControlMessage
from orca_jax.request.routed_experts import ExpertIds, Routing


class Routed(NamedTuple):
    """The experts that a stage's tokens chose, in the dtype of `Routing`; None without such layers."""

    of_all: jax.Array | None  # [T, layers, k], from layers that run all tokens
    of_last: jax.Array | None  # [R, 1, k], from a layer that runs each row's last token alone


def packed(chosen: Sequence[jax.Array], routing: Routing, *, last_apart: bool) -> Routed:
    """Stack each sparse layer's experts, [T, k] int32; with `last_apart` the last layer has [R, k]."""
    if not routing.n_layers:
        return Routed(None, None)

    def stacked(layers: Sequence[jax.Array]) -> jax.Array | None:
        return jnp.stack(layers, axis=1).astype(routing.dtype) if layers else None

    n = len(chosen) - last_apart
    return Routed(stacked(chosen[:n]), stacked(chosen[n:]))


class RoutedAgain(NamedTuple):
    """Experts of tokens that passed through the last layer again."""

    ids: jax.Array  # [tokens and padding, 1, k]
    at: npt.NDArray[np.int32]  # the tokens' indices in the batch


class DeviceRouted:
    """One stage's experts of the rows that ask, on their way to the host."""

    def __init__(self, message: ControlMessage, routed: Routed, again: Sequence[RoutedAgain]) -> None:
        self._message, self._routed, self._again = message, routed, again
        for array in self.arrays():
            array.copy_to_host_async()

    def arrays(self) -> Iterator[jax.Array]:
        """The arrays to copy from the device."""
        yield from (array for array in self._routed if array is not None)
        yield from (again.ids for again in self._again)

    def fetch(self) -> dict[int, ExpertIds]:
        """Experts of each row's input tokens, [input_length, layers, k], by the row's place in the batch."""
        message, of_last = self._message, self._routed.of_last
        ends = np.cumsum(message.input_length)
        layers = [] if self._routed.of_all is None else [np.asarray(self._routed.of_all)]
        if of_last is not None:
            last = np.zeros((ends[-1], *of_last.shape[1:]), of_last.dtype)
            for ids, at in self._again:
                last[at] = np.asarray(ids)[: len(at)]
            last[ends - 1] = np.asarray(of_last)[: len(ends)]
            layers.append(last)
        return {
            place: np.concatenate([each[ends[place] - n : ends[place]] for each in layers], axis=1)
            for place, n in message.routed_rows
        }


def joined(stages: Sequence[Mapping[int, ExpertIds]]) -> dict[int, ExpertIds]:
    """Join the experts of all stages' layers, first to last."""
    return {
        place: np.concatenate([stage[place] for stage in stages], axis=1)
        for place in (stages[0] if stages else ())
    }
