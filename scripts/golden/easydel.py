"""Make the golden files of EasyDeL: tiny models saved by its `save_pretrained`, and its forward pass.

Needs `easydel` 0.3 with `pillow`, on Python 3.12; the tests that read the files do not. One model is saved as
a step of a training run, with its optimizer. EasyDeL rounds its rotary tables to bfloat16, whatever the
model's dtype; here they are in float32, so that differences of other origin are seen.
"""

# pyright: reportMissingImports=false

import json
from collections.abc import Sequence
from typing import Any

import easydel as ed
import jax
import jax.numpy as jnp
import numpy as np
import optax
from easydel.infra.base_config import EasyDeLBaseConfig
from easydel.infra.utils import ModuleCaches
from easydel.layers import get_frequencies
from flax import nnx

from scripts.golden.trainers import CONFIG, drawn, finish, start

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Name, the beginning of EasyDeL's classes, and the fields of config.json.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "easydel-llama": ("LlamaConfig", "Llama", {"rope_scaling": LLAMA3_ROPE}),
    "easydel-mistral": ("MistralConfig", "Mistral", {"sliding_window": None}),
    "easydel-qwen2-step": ("Qwen2Config", "Qwen2", {}),
    "easydel-qwen3-tied": ("Qwen3Config", "Qwen3", {"tie_word_embeddings": True}),
    "easydel-mixtral": (
        "MixtralConfig",
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "sliding_window": None},
    ),
    "easydel-qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
}
_SEED = 1  # of the weights


def float32_tables(config: Any, head_size: int | None = None, *others: Any, **named: Any) -> Any:
    """The tables of EasyDeL's `get_basic_frequencies`, which it rounds to bfloat16."""
    size = head_size or config.head_dim
    tables = get_frequencies(
        head_size=size,
        rotary_dim=size,
        max_position=config.granted_freq_max_position_embedding,
        base=config.rope_theta,
        rope_scaling=config._get_rope_config().to_dict(),
        partial_rotary_factor=1.0,
    )
    return ModuleCaches(tables)


def save(name: str, config_class: str, prefix: str, fields: dict[str, Any]) -> None:
    """Draw a model's weights, save them as a trainer does, and write what the model computes."""
    directory = start(name)
    attention = {"attn_mechanism": "vanilla", "attn_dtype": jnp.float32, "kvdtype": jnp.float32}
    config = getattr(ed, config_class)(**CONFIG | fields, **attention, eos_token_id=None)
    made = getattr(ed, f"{prefix}ForCausalLM")
    numbers: dict[str, Any] = {"dtype": jnp.float32, "param_dtype": jnp.float32, "precision": "highest"}
    with config.mesh:
        model = made(config=config, **numbers, rngs=nnx.Rngs(0))
        nnx.update(model, jax.tree.map(jnp.asarray, drawn(nnx.state(model, nnx.Param), _SEED)))
        if name.endswith("step"):
            state = ed.EasyDeLState.create(model=model, tx=optax.sgd(0.1, momentum=0.9), init_opt_state=True)
            state.save_state(str(directory / "run-3"), step=3)
            saved = directory / "run-3"
        else:
            model.save_pretrained(str(directory))
            saved = directory

        @nnx.jit
        def logits(model: Any, tokens: jax.Array) -> jax.Array:
            return model(input_ids=tokens).logits

        def forward(tokens: np.ndarray) -> Any:
            padded = np.pad(tokens, ((0, 0), (0, 24 - tokens.shape[1])))
            return logits(model, jnp.asarray(padded))[:, : tokens.shape[1]]

        written = json.loads((saved / "config.json").read_text())
        (saved / "README.md").unlink()
        finish(directory, written, forward)


def make_files(only: Sequence[str]) -> None:
    """Write all of them, or those that the command line names."""
    jax.config.update("jax_default_matmul_precision", "highest")
    EasyDeLBaseConfig.get_basic_frequencies = float32_tables
    for name, (config_class, prefix, fields) in MODELS.items():
        if not only or name in only:
            save(name, config_class, prefix, fields)
