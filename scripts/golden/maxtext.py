"""Make the golden files of MaxText: tiny models saved by its checkpointing, and its forward pass.

Needs `maxtext` on Python 3.12, without its extras for accelerators but with the packages that it imports; the
tests that read the files need none of them. The checkpoints are those of a training state (weights, the
optimizer's state, the step), with layers scanned and not.
"""

# pyright: reportMissingImports=false

import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import optax
from flax import nnx
from maxtext.common import checkpointing
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.configs import pyconfig
from maxtext.layers.moe import MoEBiasVar
from maxtext.utils import maxtext_utils, model_creation_utils

from scripts.golden.trainers import CONFIG, GEMMA_CONFIG, drawn, finish, start

BASE = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
SIZES: dict[str, Any] = {
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 48,
    "base_num_decoder_layers": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_target_length": 64,
    "per_device_batch_size": 1,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "remat_policy": "full",
    "normalization_layer_epsilon": 1e-5,
    "rope_max_timescale": 10_000,
    "enable_dropout": False,
    "skip_jax_distributed_system": True,
    "override_model_config": True,
    "run_name": "golden",
    "base_output_directory": "golden",
    "enable_goodput_recording": False,
    "enable_checkpointing": True,
    "async_checkpointing": False,
}
GEMMA: dict[str, Any] = {"normalization_layer_epsilon": 1e-6, "sliding_window_size": 5}
QUERY_SCALAR = {"query_pre_attn_scalar": 16}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# `megablox` is a kernel for TPUs; without it the products are `jax.lax.ragged_dot`. No token is dropped.
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "base_mlp_dim": 16, "base_moe_mlp_dim": 16, "megablox": False,
}  # fmt: skip
EXPERTS_CONFIG = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
YARN: dict[str, Any] = {
    "rope_factor": 4.0, "original_max_position_embeddings": 16, "max_position_embeddings": 64,
}  # fmt: skip
YARN_CONFIG: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10}
DEEPSEEK: dict[str, Any] = {
    **EXPERTS,
    **YARN,
    **LATENT,
    "head_dim": 8,
    "base_num_kv_heads": 4,
    "base_num_decoder_layers": 3,
    "base_mlp_dim": 24,
    "first_num_dense_layers": 1,
    "shared_experts": 2,
    "normalization_layer_epsilon": 1e-6,
}
DEEPSEEK_CONFIG: dict[str, Any] = LATENT | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
}
# Name, MaxText's model, its settings, and the fields of config.json.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "maxtext-llama2": ("llama2-7b", {}, {"model_type": "llama"}),
    "maxtext-llama3.1": ("llama3.1-8b", {}, {"model_type": "llama", "rope_scaling": LLAMA3_ROPE}),
    "maxtext-mistral": ("mistral-7b", {}, {"model_type": "mistral", "sliding_window": None}),
    "maxtext-qwen2": ("qwen2.5-7b", {}, {"model_type": "qwen2"}),
    "maxtext-qwen3": ("qwen3-0.6b", {}, {"model_type": "qwen3", "tie_word_embeddings": True}),
    "maxtext-gemma": ("gemma-2b", GEMMA, GEMMA_CONFIG | {"model_type": "gemma"}),
    "maxtext-gemma2": (
        "gemma2-2b",
        GEMMA,  # two layers of MaxText are four
        GEMMA_CONFIG | QUERY_SCALAR | {"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 5},
    ),
    "maxtext-gemma3": (
        "gemma3-4b",
        GEMMA
        | {"base_num_decoder_layers": 7, "rope_max_timescale": 1_000_000, "rope_linear_scaling_factor": 1.0}
        | {"use_multimodal": False},
        GEMMA_CONFIG
        | {"model_type": "gemma3_text", "num_hidden_layers": 7, "rope_theta": 1_000_000}
        | QUERY_SCALAR
        | {"sliding_window": 5},
    ),
    "maxtext-mixtral": (
        "mixtral-8x7b",
        EXPERTS,
        EXPERTS_CONFIG | {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    ),
    "maxtext-qwen3-moe": (
        "qwen3-30b-a3b",
        EXPERTS,
        EXPERTS_CONFIG | {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "maxtext-gpt-oss": (
        "gpt-oss-20b",
        EXPERTS | YARN | {"base_num_decoder_layers": 4, "sliding_window_size": 5},
        EXPERTS_CONFIG
        | {"model_type": "gpt_oss", "num_hidden_layers": 4, "sliding_window": 5}
        | {"rope_scaling": YARN_CONFIG | {"truncate": False}},
    ),
    "maxtext-deepseek2": (
        "deepseek2-16b",
        DEEPSEEK | {"mscale": 0.707, "routed_scaling_factor": 1.5},
        DEEPSEEK_CONFIG
        | {"model_type": "deepseek_v2", "n_routed_experts": 4, "routed_scaling_factor": 1.5}
        | {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False}
        | {"rope_scaling": YARN_CONFIG | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "maxtext-deepseek3": (
        "deepseek3-671b",
        DEEPSEEK | {"q_lora_rank": 14, "num_experts": 8, "n_routing_groups": 4, "topk_routing_group": 2},
        DEEPSEEK_CONFIG
        | {"model_type": "deepseek_v3", "q_lora_rank": 14, "n_routed_experts": 8, "n_group": 4}
        | {"topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
        | {"rope_scaling": YARN_CONFIG | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
}


def save(name: str, model_name: str, settings: dict[str, Any], config: dict[str, Any]) -> None:
    """Draw a model's weights, save them as MaxText's training does, and write what the model computes."""
    directory = start(name)
    made = pyconfig.initialize([sys.argv[0], BASE], model_name=model_name, **SIZES | settings)
    mesh = maxtext_utils.get_mesh_from_config(made)
    with mesh:
        model = model_creation_utils.from_config(made, mesh=mesh, rngs=nnx.Rngs(params=0, dropout=0, aqt=0))
        params = drawn(nnx.state(model, nnx.Param))
        if config.get("tie_word_embeddings"):
            # MaxText's head takes the embeddings in bfloat16, whatever the model's dtype.
            params = jax.tree.map(lambda values: values.astype(jnp.bfloat16).astype(values.dtype), params)
        nnx.update(model, params)
        nnx.update(model, drawn(nnx.state(model, MoEBiasVar)))  # DeepSeek-V3's, which no optimizer changes
        state = TrainStateNNX(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))
        manager = checkpointing.create_orbax_checkpoint_manager(str(directory), True, False, 1)
        checkpointing.save_checkpoint(manager, 3, nnx.state(state), made, force=True)
        checkpointing.wait_until_finished(manager)

        def forward(tokens: np.ndarray) -> jax.Array:
            n, length = tokens.shape
            positions = jnp.broadcast_to(jnp.arange(length), (n, length))
            return model(
                decoder_input_tokens=jnp.asarray(tokens),
                decoder_positions=positions,
                decoder_segment_ids=jnp.ones((n, length), jnp.int32),
                enable_dropout=False,
            )

        own = {"hidden_size": made.emb_dim, "head_dim": made.head_dim}
        finish(directory, CONFIG | config | own, forward)


def make_files(only: Sequence[str]) -> None:
    """Write all of them, or those that the command line names."""
    jax.config.update("jax_default_matmul_precision", "highest")
    for name, (model_name, settings, config) in MODELS.items():
        for scan in (False, True):
            full = f"{name}-scanned" if scan else name
            if not only or full in only:
                save(full, model_name, settings | {"scan_layers": scan}, config)
