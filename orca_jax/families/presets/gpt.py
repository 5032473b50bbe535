"""GPT-2, and the models of the paper's Table 1."""

from orca_jax.families.gpt_config import gpt_config
from orca_jax.families.model_config import ModelConfig

_GPT2_END_OF_TEXT = 50256


def gpt2(*, hidden_size: int, n_layers: int, n_heads: int) -> ModelConfig:
    """GPT-2 of that size."""
    return gpt_config(
        vocab_size=50257,
        n_positions=1024,
        hidden_size=hidden_size,
        n_layers=n_layers,
        n_heads=n_heads,
        ffn_size=4 * hidden_size,
        bos_token_id=_GPT2_END_OF_TEXT,
        eos_token_ids=(_GPT2_END_OF_TEXT,),
    )


def gpt3(*, hidden_size: int, n_layers: int) -> ModelConfig:
    """A model of Table 1: heads of 128, 2048 positions, GPT-2's vocabulary padded for hardware and shards."""
    return gpt_config(
        vocab_size=50257,
        n_positions=2048,
        hidden_size=hidden_size,
        n_layers=n_layers,
        n_heads=hidden_size // 128,
        ffn_size=4 * hidden_size,
        vocab_multiple=128,
        bos_token_id=_GPT2_END_OF_TEXT,
        eos_token_ids=(_GPT2_END_OF_TEXT,),
    )
