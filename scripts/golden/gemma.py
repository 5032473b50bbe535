"""Make the golden files of Gemma's library: tiny models saved by its `save_params`, and its forward pass.

Needs `gemma` on Python 3.12; the tests that read the files do not. One model is saved once more with the
flat names of the checkpoints that Google published.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from gemma import gm
from gemma.gm.ckpts import _compat
from gemma.gm.nn import _config, _modules, _transformer

from scripts.golden.trainers import GEMMA_CONFIG, drawn, finish, start

FULL, LOCAL = _modules.AttentionType.GLOBAL, _modules.AttentionType.LOCAL_SLIDING
SIZES: dict[str, Any] = {
    "num_embed": 96,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "query_pre_attn_norm": _config.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_HEAD_DIM,
}


def save(name: str, settings: dict[str, Any], config: dict[str, Any], *, flat: bool = False) -> None:
    """Draw the weights of a model, save them as `save_params` does, and write what the model computes."""
    directory = start(name)
    model = _transformer.Transformer(config=_config.TransformerConfig(**SIZES | settings), dtype=jnp.float32)
    tokens = jnp.ones((1, 13), jnp.int32)
    params = drawn(model.init(jax.random.key(0), tokens)["params"])
    if flat:
        stored = {f"transformer/{k}": v for k, v in _compat.flatten_and_remap_params(params).items()}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory / "0", stored)
    else:
        gm.ckpts.save_params(params, directory / "0", wait_until_finished=True)

    def forward(tokens: np.ndarray) -> jax.Array:
        n, length = tokens.shape
        return model.apply(
            {"params": params},
            jnp.asarray(tokens),
            positions=jnp.broadcast_to(jnp.arange(length), (n, length)),
            attention_mask=jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (n, length, length)),
        ).logits

    finish(directory, GEMMA_CONFIG | config, forward)


def make_files(only: Sequence[str]) -> None:
    """Write all of them."""
    jax.config.update("jax_default_matmul_precision", "highest")
    gemma2: dict[str, Any] = {
        "final_logit_softcap": 30.0,
        "attn_logits_soft_cap": 50.0,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "attention_types": (LOCAL, FULL),
        "sliding_window_size": 5,
    }
    config = {"model_type": "gemma2", "query_pre_attn_scalar": 8, "sliding_window": 5}
    save("gemma-gemma2", gemma2, config)
    transposed = gemma2 | {"transpose_gating_einsum": True, "num_kv_heads": 4}
    save("gemma-gemma2-flat-fused", transposed, config | {"num_key_value_heads": 4}, flat=True)
    save(
        "gemma-gemma3",
        {
            "final_logit_softcap": None,
            "use_post_attn_norm": True,
            "use_post_ffw_norm": True,
            "use_qk_norm": True,
            "attention_types": (*(LOCAL,) * 5, FULL, LOCAL),
            "sliding_window_size": 5,
            "transpose_gating_einsum": True,
            "local_base_frequency": 10_000,
            "global_base_frequency": 1_000_000,
        },
        config | {"model_type": "gemma3_text", "num_hidden_layers": 7, "rope_theta": 1_000_000},
    )
