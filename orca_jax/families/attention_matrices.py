"""The matrices of a layer's attention; parameters.py has what the letters of their axes mean."""

from orca_jax.families.attention_config import Attention

Matrix = tuple[str, tuple[str, ...], tuple[str, ...], bool]  # name, outputs, inputs, whether with a bias


def attention_matrices(attention: Attention) -> tuple[Matrix, ...]:
    """Those of a layer, in the order in which a token meets them."""
    latent, bias = attention.latent, attention.qkv_bias
    if latent is None:
        heads = ("KD",) if attention.group == 1 else ("G", "KD")
        return ("qkv", ("G+2", "KD"), ("H",), bias), ("out", ("H",), heads, attention.out_bias)
    queries: tuple[Matrix, ...] = (("q", ("NQ",), ("H",), False),)
    if latent.query_rank is not None:
        queries = (("q_a", ("A",), ("H",), bias), ("q_b", ("NQ",), ("A",), False))
    return (
        *queries,
        ("kv_a", ("L",), ("H",), bias),
        ("kv_b", ("NM",), ("C",), False),
        ("out", ("H",), ("NW",), attention.out_bias),
    )


def latent_sizes(attention: Attention) -> dict[str, int]:
    """The sizes of the letters that latent attention alone has."""
    latent = attention.latent
    if latent is None:
        return {}
    return {
        **{"N": attention.n_heads, "Q": latent.query_size, "W": latent.value_size},
        **{"A": latent.query_rank or 0, "C": latent.rank, "L": latent.width},
        "M": latent.plain_size + latent.value_size,
    }
