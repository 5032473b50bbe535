"""Make the golden files of Tunix: tiny models saved by its CheckpointManager, and its forward pass.

Needs `google-tunix`; the tests that read the files do not. Llama and Qwen 3 of Tunix 0.1.7 rotate with
the base 1,000,000 whatever their configuration says, so config.json says so too.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.sft.checkpoint_manager import CheckpointManager

from scripts.golden.trainers import CONFIG, GEMMA_CONFIG, drawn, finish, start

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": 96,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "rope_theta": 10_000,
    "norm_eps": 1e-5,
}
EXPERTS: dict[str, Any] = {"hidden_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
GEMMA: dict[str, Any] = {
    "num_embed": 96,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 8,
    "final_logit_softcap": None,
}


def save(only: Sequence[str], name: str, model: Any, config: dict[str, Any]) -> None:
    """Draw the weights of `model`, save them as a trainer does, and write what the model computes."""
    if only and name not in only:
        return
    directory = start(name)
    nnx.update(model, drawn(nnx.state(model, nnx.Param)))
    manager = CheckpointManager(str(directory))
    manager.save(3, model, force=True)
    manager.close()

    def forward(tokens: np.ndarray) -> jax.Array:
        n, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length), (n, length))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (n, length, length))
        return model(jnp.asarray(tokens), positions, None, mask)[0]

    finish(directory, config, forward)


def make_files(only: Sequence[str]) -> None:
    """Write all of them, or those that the command line names."""
    jax.config.update("jax_default_matmul_precision", "highest")
    save(
        only,
        "tunix-llama3",
        llama3.Llama3(llama3.ModelConfig(**SIZES), rngs=nnx.Rngs(0)),
        {**CONFIG, "model_type": "llama", "rope_theta": 1_000_000},
    )
    save(
        only,
        "tunix-qwen3-tied",
        qwen3.Qwen3(qwen3.ModelConfig(**SIZES, use_tied_embedding=True), rngs=nnx.Rngs(0)),
        {**CONFIG, "model_type": "qwen3", "rope_theta": 1_000_000, "tie_word_embeddings": True},
    )
    save(
        only,
        "tunix-qwen3-moe",
        qwen3.Qwen3(qwen3.ModelConfig(**SIZES | EXPERTS), rngs=nnx.Rngs(0)),
        {**CONFIG, "model_type": "qwen3_moe", "rope_theta": 1_000_000, "moe_intermediate_size": 16}
        | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    )
    save(
        only,
        "tunix-qwen2",
        qwen2.Qwen2(qwen2.ModelConfig(**SIZES), rngs=nnx.Rngs(0)),
        {**CONFIG, "model_type": "qwen2"},
    )
    kinds = gemma.AttentionType
    save(
        only,
        "tunix-gemma-fused",
        gemma.Gemma(
            gemma.ModelConfig(
                **GEMMA,
                num_layers=2,
                num_kv_heads=4,
                use_post_attn_norm=False,
                use_post_ffw_norm=False,
                attention_types=(kinds.GLOBAL,) * 2,
            ),
            rngs=nnx.Rngs(0),
        ),
        {**GEMMA_CONFIG, "model_type": "gemma", "num_key_value_heads": 4},
    )
    save(
        only,
        "tunix-gemma2",
        gemma.Gemma(
            gemma.ModelConfig(
                **GEMMA | {"final_logit_softcap": 30.0},
                num_layers=2,
                num_kv_heads=2,
                use_post_attn_norm=True,
                use_post_ffw_norm=True,
                attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
                attn_logits_soft_cap=50.0,
                sliding_window_size=5,
            ),
            rngs=nnx.Rngs(0),
        ),
        {**GEMMA_CONFIG, "model_type": "gemma2", "query_pre_attn_scalar": 8, "sliding_window": 5},
    )
    save(
        only,
        "tunix-gemma3",
        gemma3.Gemma3(
            gemma3.ModelConfig(
                **{key: value for key, value in GEMMA.items() if key != "final_logit_softcap"},
                num_layers=7,
                num_kv_heads=2,
                sliding_window_size=5,
                local_base_frequency=10_000,
                global_base_frequency=1_000_000,
                param_dtype=jnp.float32,
            ),
            rngs=nnx.Rngs(0),
        ),
        {**GEMMA_CONFIG, "model_type": "gemma3_text", "num_hidden_layers": 7}
        | {"query_pre_attn_scalar": 8, "sliding_window": 5, "rope_theta": 1_000_000},
    )
