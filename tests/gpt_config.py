"""A decoder like GPT-2 from a flat list of sizes and options."""

from dataclasses import replace
from typing import Any

from orca_jax.families.model_config import ModelConfig
from orca_jax.families.trainers.orca_json import GPTOptions


def gpt_config(*, vocab_multiple: int = 1, **options: Any) -> ModelConfig:
    """The model of these options of GPTOptions, whose vocabulary is padded to a multiple."""
    return replace(GPTOptions(**options).model(), vocab_multiple=vocab_multiple)


def flat_options(config: ModelConfig) -> dict[str, Any]:
    """The options with which `gpt_config` makes this model."""
    layer = config.layers[0]
    options: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "n_positions": config.n_positions,
        "hidden_size": config.hidden_size,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "ffn_size": config.feed_forward.size,
        "activation": config.feed_forward.activation,
        "norm": layer.residual,
        "final_norm": config.final_norm is not None,
        "layer_norm_eps": layer.norm.eps,
        "use_bias": config.feed_forward.bias,
        "tie_embeddings": config.embedding.tied,
        "position_offset": config.positions.offset if config.positions else 0,
        "embedding_size": config.embedding.size,
        "vocab_multiple": config.vocab_multiple,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": config.eos_token_ids,
    }
    assert gpt_config(**options) == config, "made by gpt_config"
    return options


def changed_config(config: ModelConfig, **options: Any) -> ModelConfig:
    """`config` with these options of `gpt_config` changed."""
    return gpt_config(**flat_options(config) | options)
