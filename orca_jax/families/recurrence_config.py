"""Recurrent mixers: layers that carry a state of fixed size from token to token, not keys and values.

Each has a `kind`, by which JSON tells it from the others, and says which arrays are one request's state
(`state_shapes`): bytes, plans, the worker's arrays and snapshots follow from that. A new mixer is a dataclass
here, its weights in parameters.py, and its module in model/.

The devices of a stage share a mixer by its heads (ORCA 4.1). In a mixer of `n_shares` the rows of projections
and the convolution's channels are in the order of shares, so that a device has whole heads, and `share` is
the mixer that one device computes. With one share the order is a checkpoint's; parameters.share_rows has the
others. The first axis of a state counts shares or heads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from orca_jax.checks import check_whole
from orca_jax.errors import ConfigError
from orca_jax.families.limits import check_positive, check_size
from orca_jax.families.norm_config import Norm

# "model": the dtype of the model's weights.
StateDtype = Literal["model", "float32"]
StateShapes = Mapping[str, tuple[tuple[int, ...], StateDtype]]
# Neighbouring rows of a checkpoint that shares are made of: a number of heads or groups, and rows of each.
Segments = tuple[tuple[int, int], ...]
_MOST_SHARES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolution:
    """A gated causal convolution over the last `width` tokens, in each of `channels` (LFM2).

    A projection gives b, c and x; the convolution runs over b * x, and c times its result is projected back.
    With `bias` the projections and the convolution have one.
    """

    channels: int
    width: int
    bias: bool = False
    n_shares: int = 1
    kind: Literal["short_convolution"] = "short_convolution"

    def __post_init__(self) -> None:
        check_size("hidden_size", self.channels)
        check_whole("conv_width", self.width, 2, 64)
        check_whole("n_shares", self.n_shares, 1, _MOST_SHARES)

    def divides(self, n: int) -> bool:
        """Whether `n` devices can share the mixer."""
        return self.channels % n == 0

    @property
    def sizes_in_words(self) -> str:
        """The sizes that devices share, for messages."""
        return f"convolutions of {self.channels} channels"

    @property
    def share(self) -> "ShortConvolution":
        """The mixer that each device computes."""
        return replace(self, channels=self.channels // self.n_shares, n_shares=1)

    @property
    def state_shapes(self) -> StateShapes:
        """The last width - 1 inputs of the convolution in each share, the newest last."""
        return {"conv": (_inputs_kept(self), "model")}

    @property
    def elements_per_token(self) -> int:
        """The most elements that the mixer holds at a time, per token: its projections, inputs and sums."""
        return 6 * self.channels


_NORM = Norm(kind="rms_norm", eps=1e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaNet:
    """Linear attention by the gated delta rule (Yang et al., 2024; Qwen3-Next, Qwen 3.5).

    Projections give queries and keys of `n_key_heads`, values and gates z of `n_value_heads`, and for each
    value head a decay and a strength. Queries, keys and values pass a causal convolution of `width` tokens
    and silu. Each head's result is normalised and multiplied by silu(z), then projected back.

    With `by_key_head` two projections have their rows in the order of key heads: a head's query, key, values
    and gates, and its strengths and decays. Without it there is one projection each for queries, keys and
    values together, gates, strengths and decays.
    """

    n_key_heads: int
    n_value_heads: int
    key_size: int
    value_size: int
    width: int
    norm: Norm = _NORM
    by_key_head: bool = False
    n_shares: int = 1
    kind: Literal["gated_delta_net"] = "gated_delta_net"

    def __post_init__(self) -> None:
        for name in ("n_key_heads", "n_value_heads", "key_size", "value_size"):
            check_size(f"linear_{name}", getattr(self, name))
        check_whole("conv_width", self.width, 2, 64)
        check_whole("n_shares", self.n_shares, 1, _MOST_SHARES)
        if self.n_value_heads % self.n_key_heads:
            raise ConfigError(
                f"linear_n_value_heads {self.n_value_heads} is not a multiple of linear_n_key_heads "
                f"{self.n_key_heads}"
            )

    def divides(self, n: int) -> bool:
        """Whether `n` devices can share the mixer."""
        return self.n_key_heads % n == 0

    @property
    def sizes_in_words(self) -> str:
        """The sizes that devices share, for messages."""
        return f"{self.n_key_heads} key heads of linear attention"

    @property
    def share(self) -> "GatedDeltaNet":
        """The mixer that each device computes."""
        n = self.n_shares
        return replace(
            self, n_key_heads=self.n_key_heads // n, n_value_heads=self.n_value_heads // n, n_shares=1
        )

    @property
    def channel_segments(self) -> Segments:
        """The channels of a checkpoint's convolution: queries, keys, values."""
        keys = self.n_key_heads, self.key_size
        return keys, keys, (self.n_value_heads, self.value_size)

    @property
    def keys(self) -> int:
        """Elements of all key heads."""
        return self.n_key_heads * self.key_size

    @property
    def values(self) -> int:
        """Elements of all value heads."""
        return self.n_value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def state_shapes(self) -> StateShapes:
        """The convolution's last inputs in each share, and a matrix for each value head."""
        return {
            "conv": (_inputs_kept(self), "model"),
            "heads": ((self.n_value_heads, self.key_size, self.value_size), "float32"),
        }

    @property
    def elements_per_token(self) -> int:
        """The most elements that the mixer holds at a time, per token: projections, and float32 inputs."""
        return 5 * self.channels + 3 * self.values


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2:
    """A selective state space (Mamba-2, Dao & Gu, 2024), of `n_heads` heads in `n_groups`.

    One projection gives gates z, inputs x, for each group B and C of `state_size`, and for each head a step.
    x, B and C pass a causal convolution of `width` tokens and silu. The results, with a share of x, are
    multiplied by silu(z), normalised over each group, and projected back. Steps are clipped to `least_step`
    and `most_step`.

    With `norm_first` results are normalised before they are multiplied by silu(z); without a `norm` they are
    not normalised. The projection's z, x, B, C and steps are multiplied by `multipliers` (all: Falcon-H1).
    """

    n_heads: int
    head_size: int
    n_groups: int
    state_size: int
    width: int
    norm: Norm | None = _NORM
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool | None = None  # of the projection back; None: as `bias`
    least_step: float = 0.0
    most_step: float | None = None
    norm_first: bool = False
    multipliers: tuple[float, ...] = ()
    n_shares: int = 1
    kind: Literal["mamba2"] = "mamba2"

    def __post_init__(self) -> None:
        for name in ("n_heads", "head_size", "n_groups", "state_size"):
            check_size(f"mamba_{name}", getattr(self, name))
        check_whole("conv_width", self.width, 2, 64)
        check_whole("n_shares", self.n_shares, 1, _MOST_SHARES)
        if self.n_heads % self.n_groups:
            raise ConfigError(
                f"mamba_n_heads {self.n_heads} is not a multiple of mamba_n_groups {self.n_groups}"
            )
        if len(self.multipliers) not in (0, 5):
            raise ConfigError(f"ssm_multipliers are {len(self.multipliers)}; there must be 5, or none")
        for each in self.multipliers:
            check_positive("a multiplier of Mamba-2's projection", each)
        if self.least_step < 0 or (self.most_step is not None and self.most_step < self.least_step):
            limits = [self.least_step, self.most_step]
            raise ConfigError(f"time_step_limit is {limits}; it must ascend from 0")

    def divides(self, n: int) -> bool:
        """Whether `n` devices can share the mixer: each has whole groups, or heads of one group."""
        return self.n_heads % n == 0 and (self.n_groups % n == 0 or n % self.n_groups == 0)

    @property
    def sizes_in_words(self) -> str:
        """The sizes that devices share, for messages."""
        return f"{self.n_heads} heads of Mamba-2 in {self.n_groups} groups"

    @property
    def share(self) -> "Mamba2":
        """The mixer that each device computes; devices that share a group have its B and C each."""
        n = self.n_shares
        return replace(self, n_heads=self.n_heads // n, n_groups=max(1, self.n_groups // n), n_shares=1)

    @property
    def channel_segments(self) -> Segments:
        """The channels of a checkpoint's convolution: x, B, C."""
        of_groups = self.n_groups, self.state_size
        return (self.n_heads, self.head_size), of_groups, of_groups

    @property
    def row_segments(self) -> Segments:
        """The rows of a checkpoint's projection: gates, the channels, steps."""
        return (self.n_heads, self.head_size), *self.channel_segments, (self.n_heads, 1)

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.n_heads * self.head_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, and B and C of each group on each device that has some of it."""
        return self.inner + 2 * max(self.n_groups, self.n_shares) * self.state_size

    @property
    def state_shapes(self) -> StateShapes:
        """The convolution's last inputs in each share, and a matrix for each head."""
        return {
            "conv": (_inputs_kept(self), "model"),
            "heads": ((self.n_heads, self.state_size, self.head_size), "float32"),
        }

    @property
    def elements_per_token(self) -> int:
        """The most elements that the mixer holds at a time, per token: projections, and float32 inputs."""
        return 5 * self.channels + 3 * self.inner


Recurrence = ShortConvolution | GatedDeltaNet | Mamba2


def _inputs_kept(recurrence: Recurrence) -> tuple[int, int, int]:
    """The shape of a convolution's last inputs: [shares, tokens, channels of a share]."""
    n = recurrence.n_shares
    return n, recurrence.width - 1, recurrence.channels // n


def state_bytes(recurrence: Recurrence, itemsize: int) -> int:
    """Bytes of one request's state on each device, in a layer of a model with `itemsize` bytes a number."""
    return sum(
        math.prod(shape) * (itemsize if dtype == "model" else 4)
        for shape, dtype in recurrence.share.state_shapes.values()
    )
