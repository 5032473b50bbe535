"""Shapes by name: the demo model, two of GPT-2, and the models of the paper's Table 1.

A preset says nothing of weights: `--load-format dummy` draws them at random.
"""

from orca_jax.families.gpt_config import gpt_config
from orca_jax.families.model_config import ModelConfig

_GPT2_END_OF_TEXT = 50256


def _gpt2(*, hidden_size: int, n_layers: int, n_heads: int) -> ModelConfig:
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


def _gpt3(*, hidden_size: int, n_layers: int) -> ModelConfig:
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


PRESETS: dict[str, ModelConfig] = {
    "demo": gpt_config(
        vocab_size=2048,
        n_positions=512,
        hidden_size=256,
        n_layers=4,
        n_heads=4,
        ffn_size=1024,
        bos_token_id=0,
        eos_token_ids=(0,),
    ),
    "gpt2": _gpt2(hidden_size=768, n_layers=12, n_heads=12),  # 124M
    "gpt2-xl": _gpt2(hidden_size=1600, n_layers=48, n_heads=25),  # 1.6B
    "gpt3-13b": _gpt3(hidden_size=5120, n_layers=40),
    "gpt3-101b": _gpt3(hidden_size=10240, n_layers=80),
    "gpt3-175b": _gpt3(hidden_size=12288, n_layers=96),
    "gpt3-341b": _gpt3(hidden_size=15360, n_layers=120),
}
