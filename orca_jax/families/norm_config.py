"""Normalization layers."""

from dataclasses import dataclass
from typing import Literal

from orca_jax.errors import ConfigError
from orca_jax.families.limits import check_choice

NormKind = Literal["layer_norm", "rms_norm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """A LayerNorm with a scale and, with `bias`, a bias, or an RMSNorm with a scale.

    With `unit_offset` the norm scales by 1 + w, where w is the stored scale (Gemma).
    """

    kind: NormKind = "layer_norm"
    eps: float = 1e-5
    bias: bool = True
    unit_offset: bool = False

    def __post_init__(self) -> None:
        check_choice("the kind of a norm", self.kind, NormKind)
        if not 0.0 < self.eps < 1.0:
            raise ConfigError(f"norm_eps is {self.eps!r}; it must be between 0 and 1")

    @property
    def has_bias(self) -> bool:
        return self.kind == "layer_norm" and self.bias
