"""Make the golden files of Levanter: tiny models saved by its `save_checkpoint`, and its forward pass.

Needs `levanter` 1.2 for most of them; the tests that read the files do not. One is saved layer by layer.
Newer versions are the package `marin-levanter` (pre-releases, on Python 3.12), which put all arrays of a
step into one OCDBT database in Zarr 3. With it the script makes the models whose names end in `-database`.
"""

# pyright: reportMissingImports=false

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from levanter.checkpoint import save_checkpoint
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, Llama3RotaryEmbeddingsConfig
from levanter.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from levanter.models.llama import LlamaConfig
from levanter.models.mistral import MistralConfig
from levanter.models.mixtral import MixtralConfig
from levanter.models.qwen import Qwen3Config, QwenConfig

from scripts.golden.trainers import CONFIG, GEMMA_CONFIG, drawn, finish, start

_IS_MARIN = "max_seq_len" in {field.name for field in dataclasses.fields(LlamaConfig)}
SIZES: dict[str, Any] = {
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len" if _IS_MARIN else "seq_len": 64,
    "head_dim": 8,
    "layer_norm_epsilon": 1e-5,
    "gradient_checkpointing": False,
    "attn_backend": AttentionBackend.VANILLA,
    "rope": DefaultRotaryEmbeddingsConfig(),
}
LLAMA3 = Llama3RotaryEmbeddingsConfig(
    theta=10_000, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA: dict[str, Any] = {"layer_norm_epsilon": 1e-6, "tie_word_embeddings": True, "vocab_size": 96}
_SEED = 1  # of the weights
# Name, Levanter's configuration, and the fields of config.json.
MIXTRAL: tuple[Any, dict[str, Any]] = (
    MixtralConfig(**SIZES | {"intermediate_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}),
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"sliding_window": None, "intermediate_size": 16},
)
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "levanter-llama": (
        LlamaConfig(**SIZES | {"rope": LLAMA3}),
        {"model_type": "llama", "rope_scaling": LLAMA3_ROPE},
    ),
    "levanter-llama-apart": (LlamaConfig(**SIZES | {"scan_layers": False}), {"model_type": "llama"}),
    "levanter-mistral": (MistralConfig(**SIZES), {"model_type": "mistral", "sliding_window": None}),
    "levanter-qwen2": (QwenConfig(**SIZES), {"model_type": "qwen2"}),
    "levanter-qwen3-database": (
        Qwen3Config(**SIZES | {"tie_word_embeddings": True}),
        {"model_type": "qwen3", "tie_word_embeddings": True},
    ),
    "levanter-mixtral": MIXTRAL,
    "levanter-mixtral-database": MIXTRAL,
    "levanter-gemma": (GemmaConfig(**SIZES | GEMMA), GEMMA_CONFIG | {"model_type": "gemma"}),
    "levanter-gemma2": (
        Gemma2Config(**SIZES | GEMMA | {"query_pre_attn_scalar": 8}),
        GEMMA_CONFIG
        | {"model_type": "gemma2", "query_pre_attn_scalar": 8, "sliding_window": 64}
        | {"final_logit_softcapping": None},  # Levanter has the field, and does not use it
    ),
    "levanter-gemma3": (
        Gemma3Config(**SIZES | GEMMA | {"query_pre_attn_scalar": 8, "sliding_window_pattern": 6}),
        GEMMA_CONFIG | {"model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window": 64},
    ),
}


def save(name: str, config: Any, fields: dict[str, Any]) -> None:
    """Draw a model's weights, save them as a trainer does, and write what the model computes."""
    directory = start(name)
    model = config.model_type.init(hax.Axis("vocab", 96), config, key=jax.random.PRNGKey(0))
    arrays, rest = eqx.partition(model, eqx.is_array)
    model = eqx.combine(jax.tree.map(jnp.asarray, drawn(arrays, _SEED)), rest)
    step = directory / "step-3"
    state = {"model": model, "opt_state": {"mu": {"model": model.transformer.norm}}, "_step": jnp.array(3)}
    save_checkpoint(state, 3, str(step), is_temporary=False)
    position = hax.Axis("position", 64)

    @eqx.filter_jit
    def logits(model: Any, tokens: jax.Array) -> jax.Array:
        batch = hax.Axis("batch", len(tokens))
        found = model(hax.named(tokens, (batch, position)), AttentionMask.causal())
        found = found[0] if isinstance(found, tuple) else found  # a mixture's losses follow
        return found.rearrange(("batch", "position", "vocab")).array

    def forward(tokens: np.ndarray) -> Any:
        padded = np.pad(tokens, ((0, 0), (0, position.size - tokens.shape[1])))
        return logits(model, jnp.asarray(padded))[:, : tokens.shape[1]]

    finish(directory, CONFIG | fields, forward)


def make_files(only: Sequence[str]) -> None:
    """Write all of them, or those that the command line names."""
    jax.config.update("jax_default_matmul_precision", "highest")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for name, (config, fields) in MODELS.items():
        if name.endswith("-database") == _IS_MARIN and (not only or name in only):
            with jax.set_mesh(mesh):
                save(name, config, fields)
