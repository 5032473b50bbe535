"""Experts: many feed-forward layers, of which each token takes a few."""

from dataclasses import dataclass
from typing import Literal

from orca_jax.checks import check_whole
from orca_jax.errors import ConfigError
from orca_jax.families.limits import check_choice, check_positive, check_size
from orca_jax.families.packed_form import EXACT_MXFP4
from orca_jax.families.weight_form import DENSE, WeightForm

Scores = Literal["softmax", "softmax_of_chosen", "sigmoid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """`number` feed-forward layers; a token takes the weighted sum of the `top_k` with the highest scores.

    The router, a linear layer, gives a token a logit for each expert. In float32, scores are the logits'
    softmax or sigmoid, or with `softmax_of_chosen` a softmax over the chosen experts' logits alone. The
    weights are the chosen scores, with `renormalised` divided by their sum, or by `least_sum` if that is
    more, times `multiplier`.

    A `correction_bias` adds a number for each expert to its score, for the choice alone. With `n_groups` the
    experts form groups of neighbours, and only the `top_groups` best groups take part in the choice: those
    with the greatest score, or with a correction bias the greatest sum of two scores.

    `shared_size` is the width of a shared expert, a layer that every token runs, gated where the experts are;
    with `shared_gate` its result is multiplied by the sigmoid of one more linear layer's output.

    With a `latent_size` a linear layer makes the experts' inputs of so many elements, and another one the
    result of their sum (Nemotron 3 Super). Router and shared expert take the hidden states.

    With a `router_norm` the router takes the hidden states before the layer's norm, through an RMSNorm of its
    own with this eps, and its logits are multiplied by `router_multiplier`. With `scaled` each expert's
    weight is multiplied by a number that is learned (both: Gemma 4).

    With `weighs_inputs` an expert's weight multiplies its inputs instead of its result (Llama 4).

    With `packed` the experts' matrices stay in MXFP4 (mxfp4.py) on the devices, which hold whole experts.
    """

    number: int
    top_k: int
    scores: Scores = "softmax"
    renormalised: bool = False
    least_sum: float = 0.0
    multiplier: float = 1.0
    router_bias: bool = False
    correction_bias: bool = False
    n_groups: int = 1
    top_groups: int = 1
    shared_size: int | None = None
    shared_gate: bool = False
    latent_size: int | None = None
    router_norm: float | None = None
    router_multiplier: float = 1.0
    scaled: bool = False
    weighs_inputs: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        check_size("n_experts", self.number)
        check_whole("top_k", self.top_k, 1, self.number)
        check_choice("the scores of experts", self.scores, Scores)
        check_positive("experts_multiplier", self.multiplier)
        if self.least_sum:
            check_positive("least_sum", self.least_sum)
        check_whole("n_groups", self.n_groups, 1, self.number)
        check_whole("top_groups", self.top_groups, 1, self.n_groups)
        if self.shared_size is not None:
            check_size("shared_size", self.shared_size)
        elif self.shared_gate:
            raise ConfigError("shared_gate is set, but there is no shared_size")
        if self.router_norm is not None:
            check_positive("norm_eps", self.router_norm)
        check_positive("router_multiplier", self.router_multiplier)
        if self.latent_size is not None:
            check_size("latent_size", self.latent_size)
            if self.packed:
                raise ConfigError("experts in a latent space that stay packed are not supported")
        if self.scores == "softmax_of_chosen" and (self.renormalised or self.correction_bias):
            raise ConfigError("a softmax of the chosen is neither renormalised nor corrected")
        if self.number % self.n_groups:
            raise ConfigError(f"n_experts {self.number} is not a multiple of n_groups {self.n_groups}")
        if self.top_k > self.top_groups * self.group_size:
            raise ConfigError(
                f"top_k is {self.top_k}, but {self.top_groups} groups have "
                f"{self.top_groups * self.group_size} experts"
            )
        if self.n_groups > 1 and self.group_size < self.scores_of_group:
            raise ConfigError(f"a group of {self.group_size} experts has no {self.scores_of_group} scores")

    @property
    def form(self) -> WeightForm:
        """The form of the experts' matrices."""
        return EXACT_MXFP4 if self.packed else DENSE

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.number // self.n_groups

    @property
    def scores_of_group(self) -> int:
        """The number of a group's best scores that are added to compare it."""
        return 2 if self.correction_bias else 1

    def expected_hit(self, n_tokens: float) -> float:
        """The expected number of experts in use if `n_tokens` choose at random."""
        return self.number * (1 - (1 - self.top_k / self.number) ** n_tokens)
