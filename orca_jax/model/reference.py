"""The oracle: the same model for one request, dense, without cache, padding or batching.

It shares no code with the engine but the names of the parameters, and is written to be compared with the
papers line by line (GPT-2; OPT for the position offset, post-LayerNorm and the projections). Everything is
float32.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from orca_jax.families.model_config import Activation, ModelConfig, Norm

Parameters = Mapping[str, jax.Array]


def forward(config: ModelConfig, parameters: Parameters, token_ids: jax.Array) -> jax.Array:
    """Logits [T, V] float32 of every position of one sequence `token_ids` [T] int32."""
    p = {name: value.astype(jnp.float32) for name, value in parameters.items()}
    n_tokens = token_ids.shape[0]

    x = p["token_embedding"][token_ids]  # [T, E]
    if "project_in" in p:
        x = x @ p["project_in"].T
    if config.positions is not None:
        x = x + p["position_embedding"][jnp.arange(n_tokens) + config.positions.offset]  # [T, H]

    def norm(kind: Norm, name: str, value: jax.Array) -> jax.Array:
        if kind.kind == "rms_norm":
            return value / jnp.sqrt((value**2).mean(axis=-1, keepdims=True) + kind.eps) * p[f"{name}.scale"]
        mean = value.mean(axis=-1, keepdims=True)
        variance = ((value - mean) ** 2).mean(axis=-1, keepdims=True)
        return (value - mean) / jnp.sqrt(variance + kind.eps) * p[f"{name}.scale"] + p[f"{name}.bias"]

    def linear(name: str, value: jax.Array) -> jax.Array:
        product = jnp.einsum("ti,...i->t...", value, p[f"{name}.weight"])
        return product + p[f"{name}.bias"] if f"{name}.bias" in p else product

    def attention(name: str, value: jax.Array) -> jax.Array:
        shape = (n_tokens, 3, config.n_heads, config.head_size)
        qkv = linear(f"{name}.qkv", value)  # [T, 3, H]
        q, k, v = qkv.reshape(shape).transpose(1, 2, 0, 3)  # each [N, T, D]
        scores = q @ k.transpose(0, 2, 1) / jnp.sqrt(config.head_size)  # [N, T, T]
        causal = jnp.tril(jnp.ones((n_tokens, n_tokens), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        merged = (weights @ v).transpose(1, 0, 2).reshape(n_tokens, config.hidden_size)
        return linear(f"{name}.out", merged)

    def feed_forward(activation: Activation, name: str, value: jax.Array) -> jax.Array:
        up = linear(f"{name}.up", value)
        active = {
            "gelu_tanh": lambda u: 0.5 * u * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (u + 0.044715 * u**3))),
            "gelu": lambda u: 0.5 * u * (1 + jax.scipy.special.erf(u / jnp.sqrt(2.0))),
            "relu": lambda u: jnp.maximum(u, 0),
            "silu": lambda u: u / (1 + jnp.exp(-u)),
        }[activation](up)
        return linear(f"{name}.down", active)

    for i, layer in enumerate(config.layers):
        name, active = f"layers.{i}", layer.feed_forward.activation
        if layer.residual == "pre":
            x = x + attention(name, norm(layer.norm, f"{name}.attn_norm", x))
            x = x + feed_forward(active, name, norm(layer.norm, f"{name}.mlp_norm", x))
        else:
            x = norm(layer.norm, f"{name}.attn_norm", x + attention(name, x))
            x = norm(layer.norm, f"{name}.mlp_norm", x + feed_forward(active, name, x))

    if config.final_norm is not None:
        x = norm(config.final_norm, "final_norm", x)
    if "project_out" in p:
        x = x @ p["project_out"].T
    head = p["token_embedding"] if config.embedding.tied else p["head.weight"]
    return (x @ head.T)[:, : config.vocab_size]
