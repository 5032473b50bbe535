"""Recurrent mixers: layers that carry a state of fixed size from token to token, not keys and values.

Each has a `kind`, by which JSON tells it from the others, and says which arrays are one request's state
(`state_shapes`): bytes, plans, the worker's arrays and snapshots follow from that. A new mixer is a dataclass
here, its weights in parameters.py, and its module in model/.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orca_jax.checks import check_whole
from orca_jax.families.limits import check_size

# "model": the dtype of the model's weights.
StateDtype = Literal["model", "float32"]
StateShapes = Mapping[str, tuple[tuple[int, ...], StateDtype]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolution:
    """A gated causal convolution over the last `width` tokens, in each of `channels` (LFM2).

    A projection gives b, c and x; the convolution runs over b * x, and c times its result is projected back.
    With `bias` the projections and the convolution have one.
    """

    channels: int
    width: int
    bias: bool = False
    kind: Literal["short_convolution"] = "short_convolution"

    def __post_init__(self) -> None:
        check_size("hidden_size", self.channels)
        check_whole("conv_width", self.width, 2, 64)

    @property
    def state_shapes(self) -> StateShapes:
        """The last width - 1 inputs of the convolution, the newest last."""
        return {"conv": ((self.width - 1, self.channels), "model")}

    @property
    def elements_per_token(self) -> int:
        """The most elements that the mixer holds at a time, per token: its projections, inputs and sums."""
        return 6 * self.channels


Recurrence = ShortConvolution


def state_bytes(recurrence: Recurrence, itemsize: int) -> int:
    """Bytes of one request's state in a layer of a model whose dtype has `itemsize` bytes."""
    return sum(
        math.prod(shape) * (itemsize if dtype == "model" else 4)
        for shape, dtype in recurrence.state_shapes.values()
    )
