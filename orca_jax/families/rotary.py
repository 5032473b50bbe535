"""Rotary position embeddings (Su et al., 2021) and their scalings for long contexts.

Pairs of a head's elements are rotated: pair i of a token at position p by the angle p * f[i]. The frequencies
f and the factor on cosine and sine are computed here, in NumPy float32, once for each compiled program.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from orca_jax.checks import check_whole
from orca_jax.errors import ConfigError
from orca_jax.families.limits import check_choice, check_positive, check_size

ScalingKind = Literal["linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """A change of frequencies for sequences longer than the `original_positions` of training.

    - linear: all frequencies divided by `factor`.
    - dynamic: a larger base for sequences beyond `original_positions`; up to it nothing changes. The base is
      fixed when the model is loaded: the one for a sequence of `n_positions`.
    - yarn (Peng et al., 2023): slow pairs divided by `factor`, fast ones kept, a ramp between the pairs that
      turn `beta_fast` and `beta_slow` times in `original_positions`.
    - llama3: likewise, with wavelengths compared to `original_positions` over the two `freq_factor`s.
    - longrope (Ding et al., 2024): each frequency divided by its own factor, of `long_factors` if
      `n_positions` exceeds `original_positions` and of `short_factors` otherwise. The choice is made when the
      model is loaded, not by a sequence's length: cached keys cannot be rotated again.

    `attention_factor` multiplies cosine and sine; None is the value that the scaling's authors prescribe.
    """

    kind: ScalingKind
    factor: float = 1.0
    original_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_choice("rope_type", self.kind, ScalingKind)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            check_positive(f"the rotary scaling's {name}", getattr(self, name))
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            if getattr(self, name) is not None:
                check_positive(f"the rotary scaling's {name}", getattr(self, name))
        for each in (*self.short_factors, *self.long_factors):
            check_positive("a factor of the rotary scaling", each)
        if self.original_positions is None:
            if self.kind != "linear":
                raise ConfigError(f"the rotary scaling {self.kind} needs original_positions")
        else:
            check_size("n_positions", self.original_positions)
        if self.kind == "llama3" and self.low_freq_factor > self.high_freq_factor:
            raise ConfigError(
                f"the rotary scaling's low_freq_factor is {self.low_freq_factor:g}; it must be at most its "
                f"high_freq_factor {self.high_freq_factor:g}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """The first `size` elements of each head are rotated, at frequencies base ** (-2i / size).

    Element i is paired with element i + size / 2, or with `interleaved` 2i with 2i + 1. With `n_turned` only
    so many first pairs turn, at these same frequencies (Gemma 4).
    """

    size: int
    base: float = 10_000.0
    interleaved: bool = False
    scaling: Scaling | None = None
    n_turned: int | None = None

    def __post_init__(self) -> None:
        check_size("rotary_size", self.size)
        if self.n_turned is not None:
            check_whole("the pairs of a head that turn", self.n_turned, 1, self.size // 2)
            if self.scaling is not None:
                raise ConfigError("a rotary scaling with pairs that do not turn is not supported")
        if self.size % 2:
            raise ConfigError(f"rotary_size is {self.size}; elements are rotated in pairs: it must be even")
        check_positive("the rotary base", self.base)
        if self.base <= 1:
            raise ConfigError(f"the rotary base is {self.base!r}; it must be above 1")
        if self.scaling is not None and self.scaling.kind == "longrope":
            for name in ("short_factors", "long_factors"):
                if len(getattr(self.scaling, name)) != self.size // 2:
                    raise ConfigError(
                        f"the rotary scaling's {name} are {len(getattr(self.scaling, name))}; longrope needs "
                        f"one for each of the {self.size // 2} pairs of a head"
                    )

    def frequencies(self, n_positions: int) -> npt.NDArray[np.float32]:
        """The frequencies [size / 2] in radians per position, for a model of `n_positions`."""
        scaling, base = self.scaling, self.base
        if scaling is not None and scaling.kind == "dynamic":
            base = _stretched_base(self, scaling, n_positions)
        plain = np.float32(1.0) / np.float32(base) ** (
            np.arange(0, self.size, 2, dtype=np.float32) / np.float32(self.size)
        )
        if scaling is None:
            return (
                plain if self.n_turned is None else np.where(np.arange(len(plain)) < self.n_turned, plain, 0)
            )
        match scaling.kind:
            case "dynamic":
                return plain
            case "linear":
                return plain / np.float32(scaling.factor)
            case "yarn":
                return _yarn(self, scaling, plain)
            case "llama3":
                return _llama3(scaling, plain)
            case "longrope":
                far = n_positions > _original(scaling)
                factors = scaling.long_factors if far else scaling.short_factors
                return plain / np.array(factors, np.float32)

    @property
    def attention_factor(self) -> float:
        """The factor on cosine and sine."""
        scaling = self.scaling
        if scaling is None or scaling.kind not in ("yarn", "longrope"):
            return 1.0
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        if scaling.kind == "longrope":
            if scaling.factor <= 1.0:
                return 1.0
            return math.sqrt(1 + math.log(scaling.factor) / math.log(_original(scaling)))
        if scaling.mscale and scaling.mscale_all_dim:
            return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
        return _mscale(scaling.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """DeepSeek's further factor on scores: the square of yarn's factor for `mscale_all_dim`."""
        scaling = self.scaling
        if scaling is None or scaling.kind != "yarn" or scaling.mscale_all_dim is None:
            return 1.0
        return _mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def _original(scaling: Scaling) -> int:
    assert scaling.original_positions is not None, scaling
    return scaling.original_positions


def _mscale(factor: float, by: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * by * math.log(factor) + 1.0


def _stretched_base(rotary: Rotary, scaling: Scaling, n_positions: int) -> float:
    original = _original(scaling)
    longest = max(n_positions, original)
    stretch = scaling.factor * longest / original - (scaling.factor - 1)
    return rotary.base * stretch ** (rotary.size / (rotary.size - 2)) if stretch != 1.0 else rotary.base


def _yarn(rotary: Rotary, scaling: Scaling, plain: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    original, n_pairs = _original(scaling), rotary.size // 2

    def pair_turning(n_turns: float) -> float:
        """The pair, perhaps a fraction, that turns `n_turns` times in `original` positions."""
        return rotary.size * math.log(original / (n_turns * 2 * math.pi)) / (2 * math.log(rotary.base))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.size - 1)
    if low == high:
        high += 0.001
    slow = np.clip((np.arange(n_pairs) - low) / (high - low), 0, 1).astype(np.float32)
    turned = plain / np.float32(scaling.factor) * slow + plain * (1 - slow)
    return turned.astype(np.float32)


def _llama3(scaling: Scaling, plain: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    n_turns = np.float32(_original(scaling)) * plain / np.float32(2 * math.pi)  # in the original positions
    kept = (n_turns > np.float32(low)).astype(np.float32)  # where both are equal (Llama 4)
    if low < high:
        kept = np.clip((n_turns - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    turned = (1 - kept) * plain / np.float32(scaling.factor) + kept * plain
    return turned.astype(np.float32)
