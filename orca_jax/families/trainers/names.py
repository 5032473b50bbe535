"""What the trainers' tables of names are written with."""

from orca_jax.families.model_config import ModelConfig
from orca_jax.families.stored_name import HeadOrder, StoredName
from orca_jax.families.trainers.array_form import ArrayForm


def array(name: str, axes: str, *, heads: HeadOrder | None = None) -> StoredName:
    """One array."""
    return StoredName((name,), heads=heads, forms=(ArrayForm(axes),))


def arrays(*parts: tuple[str, str]) -> StoredName:
    """Several arrays, each some rows of our weight."""
    return StoredName(tuple(name for name, _ in parts), forms=tuple(ArrayForm(axes) for _, axes in parts))


def queries_keys_values(*parts: tuple[str, ArrayForm]) -> StoredName:
    """`qkv`: queries, keys and values, each with the form that it has in its array."""
    names, forms = zip(*parts, strict=True)
    return StoredName(names, heads="separate", forms=forms)


def gemma_heads(model: ModelConfig, place: str) -> dict[str, StoredName]:
    """The weights of an attention of Gemma's own code, whose names begin with `place`."""
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
    """Whether it is one of Gemma's family, by its norms."""
    return model.layers[0].norm.unit_offset
