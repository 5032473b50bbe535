"""A model like another, but for some options."""

from typing import Any

from orca_jax.families.gpt_config import flat_options, gpt_config
from orca_jax.families.model_config import ModelConfig


def changed_config(config: ModelConfig, **options: Any) -> ModelConfig:
    """`config`, made by `gpt_config` with these options instead of its own."""
    own = flat_options(config)
    assert own is not None, "made by gpt_config"
    return gpt_config(**own | options)
