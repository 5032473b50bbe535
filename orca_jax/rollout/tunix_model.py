"""A model of Tunix as one of ours: the fields of its config.json, and its weights by our names.

Tunix itself is not imported: its configs are read by their fields, its weights by their paths.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from orca_jax.errors import NotSupported, TensorMismatch

Arrays = Mapping[str, jax.Array]

# Tunix's Llama 3 and Qwen 3 rotate with this, whatever their config's rope_theta says (0.1.7).
_ROPE_THETA = 1_000_000

# By the module of Tunix's model. Of Qwen 3 the dense models.
_MODEL_TYPES = {"llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def config_fields(model: Any, n_positions: int) -> dict[str, Any]:
    """The fields of config.json for a model of Tunix, of whose positions `n_positions` are used.

    Raises NotSupported for a model other than Llama 3, Qwen 2 or a dense Qwen 3.
    """
    family = type(model).__module__.split(".")[-2:-1]
    model_type = _MODEL_TYPES.get(family[0] if family else "")
    config = getattr(model, "config", None)
    if model_type is None or getattr(config, "num_experts", None):
        raise NotSupported(
            f"the rollout model is {type(model).__module__}.{type(model).__name__}; it must be Tunix's "
            "Llama3, Qwen2 or a Qwen3 without experts",
            param="rollout_actor",
        )
    assert config is not None
    tied = getattr(config, "weight_tying", None)
    return {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": float(config.rope_theta if model_type == "qwen2" else _ROPE_THETA),
        "max_position_embeddings": n_positions,
        "tie_word_embeddings": bool(config.use_tied_embedding if tied is None else tied),
        "hidden_act": "silu",
    }


def by_path(state: nnx.State) -> dict[str, jax.Array]:
    """The arrays of a state by their paths, such as "layers.0.attn.q_proj.w"."""
    return {
        ".".join(str(key) for key in path): leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for path, leaf in nnx.to_flat_state(state)
    }


def check_shapes(theirs: Arrays, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises TensorMismatch, which names the first weight that is missing, left over or of another shape."""
    for name in [*expected, *theirs]:
        found = tuple(theirs[name].shape) if name in theirs else None
        wanted = expected.get(name)
        if found != wanted:
            raise TensorMismatch(
                f"the trainer's weights are not those of the rollout's model: {name} has "
                f"{_shown(found)}, expected {_shown(wanted)}"
            )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "no weight" if shape is None else f"the shape {list(shape)}"


def our_weights(theirs: Arrays) -> dict[str, jax.Array]:
    """The weights by the names of families/parameters.py, from Tunix's by their paths.

    They stay on their devices; nothing passes through the host.
    """
    weights: dict[str, jax.Array] = {}
    layers: dict[str, dict[str, jax.Array]] = {}
    for name, array in theirs.items():
        if name.startswith("layers."):
            _, number, own = name.split(".", 2)
            layers.setdefault(number, {})[own] = array
        else:
            weights[_OUTSIDE[name]] = _transposed(array) if name == "lm_head.w" else array
    for number, layer in layers.items():
        weights |= {f"layers.{number}.{name}": array for name, array in _layer(layer).items()}
    return weights


_OUTSIDE = {
    "embedder.input_embedding": "token_embedding",
    "final_norm.w": "final_norm.scale",
    "lm_head.w": "head.weight",
}


def _layer(layer: Arrays) -> dict[str, jax.Array]:
    q, k, v = (layer[f"attn.{part}_proj.w"] for part in "qkv")
    group, head_size = q.shape[1] // k.shape[1], k.shape[2]
    weights = {
        "attn_norm.scale": layer["input_layernorm.w"],
        "mlp_norm.scale": layer["post_attention_layernorm.w"],
        "qkv.weight": _qkv(q, k, v, group=group),
        "out.weight": _out(layer["attn.o_proj.w"], group=group),
        "up.weight": _up(layer["mlp.gate_proj.kernel"], layer["mlp.up_proj.kernel"]),
        "down.weight": _transposed(layer["mlp.down_proj.kernel"]),
    }
    if "attn.q_bias" in layer:
        biases = (layer[f"attn.{part}_bias"] for part in "qkv")
        weights["qkv.bias"] = _qkv_bias(*biases, group=group, head_size=head_size)
    if "attn.q_norm.w" in layer:
        weights |= {f"{part}_norm.scale": layer[f"attn.{part}_norm.w"] for part in "qk"}
    return weights


# Programs, so that they run where the weights are; query head k * G + g is head k of our slice g.


@partial(jax.jit, static_argnames="group")
def _qkv(q: jax.Array, k: jax.Array, v: jax.Array, *, group: int) -> jax.Array:
    """q [H, N, D], k and v [H, K, D] to [G + 2, K D, H]."""
    hidden, n_kv_heads, head_size = k.shape
    queries = q.reshape(hidden, n_kv_heads, group, head_size).transpose(2, 1, 3, 0)
    others = jnp.stack([k, v]).transpose(0, 2, 3, 1)  # [2, K, D, H]
    return jnp.concatenate([queries, others]).reshape(group + 2, -1, hidden)


@partial(jax.jit, static_argnames=("group", "head_size"))
def _qkv_bias(q: jax.Array, k: jax.Array, v: jax.Array, *, group: int, head_size: int) -> jax.Array:
    """q [N D], k and v [K D] to [G + 2, K D]."""
    queries = q.reshape(-1, group, head_size).swapaxes(0, 1)
    return jnp.concatenate([queries.reshape(group, -1), k[None], v[None]])


@partial(jax.jit, static_argnames="group")
def _out(o: jax.Array, *, group: int) -> jax.Array:
    """[N, D, H] to [H, G, K D], or [H, K D] of one query head for each K/V head."""
    n_heads, head_size, hidden = o.shape
    ours = o.reshape(n_heads // group, group, head_size, hidden).transpose(3, 1, 0, 2)
    return ours.reshape((hidden, -1) if group == 1 else (hidden, group, -1))


@jax.jit
def _up(gate: jax.Array, up: jax.Array) -> jax.Array:
    """[H, F] each to [2, F, H]."""
    return jnp.stack([gate.T, up.T])


@jax.jit
def _transposed(array: jax.Array) -> jax.Array:
    return array.T
