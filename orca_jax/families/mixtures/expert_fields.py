"""The fields of config.json about experts that most families share."""

from collections.abc import Mapping
from typing import Any

from orca_jax.errors import BadModelConfig
from orca_jax.families.config_fields import ConfigFields
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import FeedForward, ModelConfig
from orca_jax.families.strict_json import shown

# Our words in an error, and config.json's.
EXPERT_NAMES: Mapping[str, str] = {
    "n_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "shared_size": "shared_expert_intermediate_size",
}


def read_experts(
    fields: ConfigFields, number: str, *, alias: str = "", renormalised: bool | None = None, **other: Any
) -> Experts:
    """Softmax, then the top k. `number` and `alias` are fields; `renormalised` None reads norm_topk_prob."""
    return Experts(
        number=fields.whole(number, alias),
        top_k=fields.whole("num_experts_per_tok"),
        renormalised=fields.flag("norm_topk_prob", False) if renormalised is None else renormalised,
        **other,
    )


def sparse_layers(fields: ConfigFields, n_layers: int) -> list[bool]:
    """Which layers have experts, by `decoder_sparse_step` and `mlp_only_layers`. Raises BadModelConfig."""
    step = fields.whole("decoder_sparse_step", default=1)
    dense = fields.numbers("mlp_only_layers")
    if step < 1 or not all(isinstance(i, int) and 0 <= i < n_layers for i in dense):
        raise BadModelConfig(
            f"{shown(fields.path)}: decoder_sparse_step: expected a whole number from 1, found {step}; "
            f"mlp_only_layers: expected layers from 0 to {n_layers - 1}, found {shown(list(dense))}"
        )
    return [i not in dense and (i + 1) % step == 0 for i in range(n_layers)]


def sparse_fields(model: ModelConfig) -> dict[str, Any] | None:
    """What `sparse_layers` reads, and the widths of both kinds of layers; None without experts."""
    kinds = [layer.feed_forward for layer in model.layers]
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
    """The first layer's experts, of those that have some."""
    every = (layer.feed_forward for layer in model.layers)
    return next((each for each in every if each.experts is not None), None)
