"""Bounds on the numbers of a model, checked when a part of a ModelConfig is made."""

from typing import Any, get_args

from orca_jax.checks import check_whole
from orca_jax.errors import ConfigError

# No trained model exceeds these; a config that claims more is a mistake or an attack.
_LIMITS = {
    "vocab_size": 1 << 22,
    "n_positions": 1 << 24,
    "encoder_positions": 1 << 21,
    "hidden_size": 1 << 17,
    "embedding_size": 1 << 17,
    "input_size": 1 << 17,
    "ffn_size": 1 << 20,
    "latent_size": 1 << 17,
    "shared_size": 1 << 20,
    "n_experts": 1 << 12,
    "n_layers": 1024,
    "n_heads": 1024,
    "n_kv_heads": 1024,
    "head_size": 1 << 17,
    "latent_rank": 65_536,
    "latent_query_rank": 65_536,
    "latent_rotary_size": 4096,
    "latent_plain_size": 4096,
    "latent_value_size": 4096,
    "index_n_heads": 1024,
    "index_head_size": 4096,
    "index_top_k": 1 << 24,
    "linear_n_key_heads": 1024,
    "linear_n_value_heads": 1024,
    "linear_key_size": 4096,
    "linear_value_size": 4096,
    "mamba_n_heads": 4096,
    "mamba_head_size": 4096,
    "mamba_n_groups": 1024,
    "mamba_state_size": 4096,
    "rotary_size": 1 << 17,
    "window": 1 << 24,
    "relative_buckets": 1 << 12,
    "relative_distance": 1 << 16,
    "kv_repeats": 1024,
    "vocab_multiple": 1 << 16,
}


def check_size(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a whole number from 1 to the limit of the size `name`."""
    check_whole(name, value, 1, _LIMITS[name])


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raises ConfigError unless `value` is one of the Literal `choices`."""
    if value not in get_args(choices):
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(get_args(choices))}")


def check_positive(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a number above 0 and at most 1e12."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1e12:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0, at most 1e12")


def even_head_size(hidden_size: int, n_heads: int) -> int:
    """Divide the hidden size by the number of heads. Raises ConfigError where it does not divide."""
    check_size("hidden_size", hidden_size)
    check_size("n_heads", n_heads)
    if hidden_size % n_heads:
        raise ConfigError(f"hidden_size {hidden_size} is not a multiple of n_heads {n_heads}")
    return hidden_size // n_heads
