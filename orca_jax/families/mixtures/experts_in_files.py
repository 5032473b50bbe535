"""Shared parts of mixtures of experts: fields of config.json, and the storage of experts in checkpoints.

A checkpoint has one tensor for each expert's matrix, or, saved by transformers 5, one for all of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig
from orca_jax.families.stored_name import StoredName, all_experts, as_it_is, one_row, stacked
from orca_jax.families.strict_json import shown

# Our names of sizes, which errors use, and config.json's.
EXPERT_NAMES: Mapping[str, str] = {
    "n_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "shared_size": "shared_expert_intermediate_size",
}

LEAST_SUM = 1e-20  # what transformers adds to the sum of chosen scores, so that it is not zero

_MLP = "{prefix}layers.{i}.mlp."


def separate_experts(router: str, gate: str, up: str, down: str) -> dict[str, StoredName]:
    """The router, and experts with a tensor each; "{x}" in a name is the expert's number."""
    return {
        "layers.{i}.router.weight": as_it_is(router),
        "layers.{i}.experts.up.weight": stacked(gate, up),
        "layers.{i}.experts.down.weight": stacked(down),
    }


# The names in Qwen's mixtures and in most later ones.
WEIGHTS: Mapping[str, StoredName] = {
    **separate_experts(
        f"{_MLP}gate.weight", *(f"{_MLP}experts.{{x}}.{part}_proj.weight" for part in ("gate", "up", "down"))
    ),
    "layers.{i}.shared.up.weight": stacked(
        *(f"{_MLP}shared_expert.{part}_proj.weight" for part in ("gate", "up"))
    ),
    "layers.{i}.shared.down.weight": as_it_is(f"{_MLP}shared_expert.down_proj.weight"),
    "layers.{i}.shared.gate": one_row(f"{_MLP}shared_expert_gate.weight"),
}
# A shared expert without a gate, and the correction of the choice, in DeepSeek-V3 and later mixtures.
SHARED_EXPERTS: Mapping[str, StoredName] = {
    "layers.{i}.shared.up.weight": stacked(
        *(f"{_MLP}shared_experts.{part}_proj.weight" for part in ("gate", "up"))
    ),
    "layers.{i}.shared.down.weight": as_it_is(f"{_MLP}shared_experts.down_proj.weight"),
    "layers.{i}.router.correction": as_it_is(f"{_MLP}gate.e_score_correction_bias"),
}
# Names that transformers 5 saves with save_original_format=False: gate and up [X, 2 F, H], down [X, H, F].
FUSED: Mapping[str, StoredName] = {
    "layers.{i}.router.weight": as_it_is(f"{_MLP}gate.weight"),
    "layers.{i}.experts.up.weight": all_experts(f"{_MLP}experts.gate_up_proj"),
    "layers.{i}.experts.down.weight": all_experts(f"{_MLP}experts.down_proj"),
}


def read_experts(
    fields: ConfigFields, number: str, *, alias: str = "", renormalised: bool | None = None, **other: Any
) -> Experts:
    """Read experts of which a token takes the top k by softmax.

    `number` and `alias` are names of the field with their number. Without `renormalised` norm_topk_prob is
    read. `other` goes to Experts.
    """
    return Experts(
        number=fields.whole(number, alias),
        top_k=fields.whole("num_experts_per_tok"),
        renormalised=fields.flag("norm_topk_prob", False) if renormalised is None else renormalised,
        **other,
    )


def read_corrected_experts(
    fields: ConfigFields, *, multiplier: float, n_groups: int = 1, top_groups: int = 1, **other: Any
) -> Experts:
    """Read experts chosen by sigmoid and a correction, as in DeepSeek-V3.

    The arguments are the defaults; `other` goes to Experts. Raises UnsupportedModel for another choice.
    """
    fields.choice("scoring_func", {"sigmoid": None}, "sigmoid")
    fields.choice("topk_method", {"noaux_tc": None}, "noaux_tc")
    return Experts(
        number=fields.whole("n_routed_experts", "num_local_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        scores="sigmoid",
        renormalised=fields.flag("norm_topk_prob", True),
        least_sum=LEAST_SUM,
        multiplier=fields.number("routed_scaling_factor", multiplier),
        correction_bias=True,
        n_groups=fields.whole("n_group", default=n_groups),
        top_groups=fields.whole("topk_group", default=top_groups),
        **other,
    )


def read_mixed(fields: ConfigFields, dense: Layer, experts: Experts, *, n_shared: int) -> Layer:
    """Read the widths of experts and of the shared one; `n_shared` is the default of n_shared_experts.

    `dense` is the layer without experts.
    """
    size = fields.whole("moe_intermediate_size")
    shared = fields.whole("n_shared_experts", default=n_shared) * size
    return dense.with_feed_forward(size=size, experts=replace(experts, shared_size=shared or None))


def mixed_fields(model: ModelConfig) -> dict[str, Any] | None:
    """The fields that `read_corrected_experts` and `read_mixed` read; None without experts."""
    sparse = first_sparse(model)
    if sparse is None or sparse.experts is None:
        return None
    kinds = feed_forwards_of(model)
    dense, experts = next((kind for kind in kinds if kind.experts is None), sparse), sparse.experts
    return {
        "intermediate_size": dense.size,
        "moe_intermediate_size": sparse.size,
        "n_routed_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
        "n_shared_experts": (experts.shared_size or 0) // sparse.size,
        "norm_topk_prob": experts.renormalised,
        "routed_scaling_factor": experts.multiplier,
        "n_group": experts.n_groups,
        "topk_group": experts.top_groups,
    }


def sparse_layers(fields: ConfigFields, n_layers: int) -> list[bool]:
    """Read which layers have experts: `decoder_sparse_step`, `mlp_only_layers`. Raises BadModelConfig."""
    step = fields.whole("decoder_sparse_step", default=1)
    dense = fields.numbers("mlp_only_layers")
    if step < 1 or not all(isinstance(i, int) and 0 <= i < n_layers for i in dense):
        raise BadModelConfig(
            f"{shown(fields.path)}: decoder_sparse_step: expected a whole number from 1, found {step}; "
            f"mlp_only_layers: expected layers from 0 to {n_layers - 1}, found {shown(list(dense))}"
        )
    return [i not in dense and (i + 1) % step == 0 for i in range(n_layers)]


def sparse_fields(model: ModelConfig) -> dict[str, Any] | None:
    """The fields that `sparse_layers` reads, and both kinds of layers' widths; None without experts."""
    kinds = feed_forwards_of(model)
    sparse = first_sparse(model)
    if sparse is None or sparse.experts is None:
        return None
    dense = next((kind for kind in kinds if kind.experts is None), None)
    return {
        "num_experts": sparse.experts.number,
        "num_experts_per_tok": sparse.experts.top_k,
        "norm_topk_prob": sparse.experts.renormalised,
        "moe_intermediate_size": sparse.size,
        "intermediate_size": (dense or sparse).size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, kind in enumerate(kinds) if kind.experts is None],
    }


def first_sparse(model: ModelConfig) -> FeedForward | None:
    """The feed-forward part of the first layer with experts."""
    return next((layer.sparse for layer in model.layers if layer.sparse is not None), None)


def feed_forwards_of(model: ModelConfig) -> list[FeedForward]:
    """The feed-forward part of each layer that has one."""
    return [layer.feed_forward for layer in model.layers if layer.feed_forward is not None]
