"""Entries of the trainers' tables, and the kinds of models that they distinguish."""

from typing import Literal

from orca_jax.errors import UnsupportedModel
from orca_jax.families.mixtures.experts_config import Experts
from orca_jax.families.mixtures.experts_in_files import first_sparse
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import HeadOrder, StoredName
from orca_jax.families.trainers.array_form import ArrayForm

Mixture = Literal["mixtral", "qwen3_moe", "gpt_oss", "deepseek"]


def array(name: str, axes: str, *, heads: HeadOrder | None = None) -> StoredName:
    """One array."""
    return StoredName((name,), heads=heads, forms=(ArrayForm(axes),))


def arrays(*parts: tuple[str, str]) -> StoredName:
    """Several arrays, each some rows of our weight."""
    return StoredName(tuple(name for name, _ in parts), forms=tuple(ArrayForm(axes) for _, axes in parts))


def queries_keys_values(*parts: tuple[str, ArrayForm]) -> StoredName:
    """`qkv` from queries, keys and values, each with its array and form."""
    names, forms = zip(*parts, strict=True)
    return StoredName(names, heads="separate", forms=forms)


def gemma_heads(model: ModelConfig, place: str) -> dict[str, StoredName]:
    """The attention weights of Gemma's own code, whose names begin with `place`."""
    attention = model.attention
    if attention.n_kv_heads // attention.kv_repeats == attention.n_heads:
        qkv = tuple((f"{place}qkv_einsum.w", ArrayForm("3 N H D", part=part)) for part in range(3))
    else:
        keys, values = (ArrayForm("2 K H D", part=part) for part in range(2))
        qkv = (
            (f"{place}q_einsum.w", ArrayForm("N H D")),
            (f"{place}kv_einsum.w", keys),
            (f"{place}kv_einsum.w", values),
        )
    return {
        "qkv.weight": queries_keys_values(*qkv),
        "out.weight": array(f"{place}attn_vec_einsum.w", "N D H", heads="queries"),
        "q_norm.scale": array(f"{place}_query_norm.scale", "D"),
        "k_norm.scale": array(f"{place}_key_norm.scale", "D"),
    }


def is_gemma(model: ModelConfig) -> bool:
    """Whether a model is of Gemma's family, by its norms."""
    return model.layers[0].norm.unit_offset


def mixture_of(model: ModelConfig, layout: str) -> Mixture | None:
    """The kind of a model's mixture; None without experts.

    A trainer's code computes only what its own models do, so a model that differs from all kinds is refused
    even where its weights have the same shapes. Raises UnsupportedModel.
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
    has_experts = [layer.experts is not None for layer in model.layers]
    for differs, what in (
        (experts.shared_gate, "a gate of the shared expert"),
        (experts.shared_size is not None and kind != "deepseek", "a shared expert"),
        (experts.shared_size is None and kind == "deepseek", "latent attention without a shared expert"),
        (attention.qkv_bias and kind in ("mixtral", "deepseek"), "biases of queries, keys and values"),
        (attention.qk_norm is not None and attention.qk_norm.over == "width", "a qk-norm over all heads"),
        (has_experts != sorted(has_experts), "a layer without experts after one with some"),
        (attention.scores.temperature is not None, "queries scaled by their position"),
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
    """Whether the trainers' code derives the experts' weights from the router's logits in this way."""
    one_group = experts.n_groups == 1
    match kind:
        case "gpt_oss":
            return experts.scores == "softmax_of_chosen" and experts.multiplier == 1 and one_group
        case "deepseek":  # groups are compared by two scores each, and only where scores are sigmoids
            if experts.scores == "softmax":
                return not experts.renormalised and one_group
            return experts.scores == "sigmoid" and experts.renormalised and experts.correction_bias
        case _:
            plain = experts.scores == "softmax" and experts.renormalised and not experts.correction_bias
            return plain and experts.multiplier == 1 and one_group
