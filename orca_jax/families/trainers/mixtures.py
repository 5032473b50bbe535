"""Which of the mixtures of experts that trainers have a model is."""

from typing import Literal

from orca_jax.errors import UnsupportedModel
from orca_jax.families.mixtures.expert_fields import first_sparse
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.model_config import ModelConfig

Mixture = Literal["mixtral", "qwen3_moe", "gpt_oss", "deepseek"]


def mixture_of(model: ModelConfig, layout: str) -> Mixture | None:
    """The kind of a model's mixture; None without experts.

    A trainer's code computes only what its own model does, so that a model which differs from all kinds,
    also where its weights have the same shapes, is refused. Raises UnsupportedModel.
    """
    sparse = first_sparse(model)
    if sparse is None or sparse.experts is None:
        return None
    attention, experts = model.attention, sparse.experts
    kind: Mixture = "mixtral"
    if attention.latent is not None:
        kind = "deepseek"
    elif attention.scores.sinks:
        kind = "gpt_oss"
    elif attention.qk_norm is not None:
        kind = "qwen3_moe"
    has_experts = [layer.feed_forward.experts is not None for layer in model.layers]
    for differs, what in (
        (experts.shared_gate, "a gate of the shared expert"),
        (experts.shared_size is not None and kind != "deepseek", "a shared expert"),
        (experts.shared_size is None and kind == "deepseek", "latent attention without a shared expert"),
        (attention.qkv_bias and kind in ("mixtral", "deepseek"), "biases of queries, keys and values"),
        (attention.qk_norm is not None and attention.qk_norm.over == "width", "a qk-norm over all heads"),
        (has_experts != sorted(has_experts), "a layer without experts after one with some"),
        (model.layers[0].norm.unit_offset, "norms with 1 + w"),
        (not all(has_experts) and kind != "deepseek", "a layer without experts"),
        (not _weights_of(kind, experts), "another way from scores to the experts' weights"),
    ):
        if differs:
            raise UnsupportedModel(
                f"{layout} is known for mixtures like Mixtral, Qwen 3 MoE, gpt-oss and DeepSeek alone, and "
                f"this one has {what}; use safetensors, or Orbax with our names"
            )
    return kind


def _weights_of(kind: Mixture, experts: Experts) -> bool:
    """Whether the trainers' code makes these experts' weights of the router's logits."""
    one_group = experts.n_groups == 1
    match kind:
        case "gpt_oss":
            return experts.scores == "softmax_of_chosen" and experts.multiplier == 1 and one_group
        case "deepseek":  # groups are chosen by two scores each, and only of sigmoids
            if experts.scores == "softmax":
                return not experts.renormalised and one_group
            return experts.scores == "sigmoid" and experts.renormalised and experts.correction_bias
        case _:
            plain = experts.scores == "softmax" and experts.renormalised
            return plain and experts.multiplier == 1 and one_group
