"""A decoder of GPT-2's and OPT's kind by a flat list of sizes and options, as orca.json may state it too."""

from typing import Any

from orca_jax.families.limits import check_size, even_head_size
from orca_jax.families.model_config import (
    Activation,
    Attention,
    Embedding,
    FeedForward,
    Layer,
    LearnedPositions,
    ModelConfig,
    Norm,
    Residual,
)


def gpt_config(
    *,
    vocab_size: int,
    n_positions: int,
    hidden_size: int,
    n_layers: int,
    n_heads: int,
    ffn_size: int,
    activation: Activation = "gelu_tanh",
    norm: Residual = "pre",
    final_norm: bool = True,
    layer_norm_eps: float = 1e-5,
    use_bias: bool = True,
    tie_embeddings: bool = True,
    position_offset: int = 0,
    embedding_size: int = 0,
    vocab_multiple: int = 1,
    bos_token_id: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> ModelConfig:
    """Layers that are all alike, with LayerNorm and learned positions.

    `norm` is where a layer's norms are, `use_bias` holds for all linear operations of layers, and an
    `embedding_size` of 0 is the hidden size. Raises ConfigError.
    """
    head_size = even_head_size(hidden_size, n_heads)
    check_size("n_layers", n_layers)
    layer_norm = Norm(eps=layer_norm_eps)
    layer = Layer(
        attention=Attention(
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_size=head_size,
            qkv_bias=use_bias,
            out_bias=use_bias,
        ),
        feed_forward=FeedForward(size=ffn_size, activation=activation, bias=use_bias),
        norm=layer_norm,
        residual=norm,
    )
    return ModelConfig(
        vocab_size=vocab_size,
        n_positions=n_positions,
        hidden_size=hidden_size,
        layers=(layer,) * n_layers,
        embedding=Embedding(size=embedding_size or hidden_size, tied=tie_embeddings),
        positions=LearnedPositions(offset=position_offset),
        final_norm=layer_norm if final_norm else None,
        vocab_multiple=vocab_multiple,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
    )


def flat_options(config: ModelConfig) -> dict[str, Any] | None:
    """The options that `gpt_config` makes this model of; None where it is not of that kind."""
    if config.n_heads * config.head_size != config.hidden_size:
        return None
    layer = config.layers[0]
    options: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "n_positions": config.n_positions,
        "hidden_size": config.hidden_size,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "ffn_size": layer.feed_forward.size,
        "activation": layer.feed_forward.activation,
        "norm": layer.residual,
        "final_norm": config.final_norm is not None,
        "layer_norm_eps": layer.norm.eps,
        "use_bias": layer.feed_forward.bias,
        "tie_embeddings": config.embedding.tied,
        "position_offset": config.positions.offset if config.positions else 0,
        "embedding_size": config.embedding.size,
        "vocab_multiple": config.vocab_multiple,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": config.eos_token_ids,
    }
    return options if gpt_config(**options) == config else None
