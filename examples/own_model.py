"""A model of your own, trained and served as it is: gated attention, which no family here has.

Run `python -m examples.own_model`, or `orca serve examples.own_model:GatedModel`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from orca_jax import LLM, SamplingParams

H, N, K, D, F = 64, 8, 4, 16, 160  # sizes: hidden, heads, key/value heads, elements of a head, feed-forward


def _linear(rngs: nnx.Rngs, n_in: int, n_out: int, *split: str | None) -> nnx.Linear:
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), split, eager_sharding=False)
    return nnx.Linear(n_in, n_out, use_bias=False, kernel_init=kernel, rngs=rngs)


def _rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    angle = positions[..., None, None] * 100.0 ** -jnp.linspace(0, 1, D // 2)
    turned = jax.lax.complex(*jnp.split(x, 2, axis=-1)) * jnp.exp(1j * angle)
    return jnp.concatenate((turned.real, turned.imag), axis=-1)


class _Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.mlp_norm = nnx.RMSNorm(H, rngs=rngs), nnx.RMSNorm(H, rngs=rngs)
        self.q, self.k, self.v, self.gate = (_linear(rngs, H, n * D, None, "tensor") for n in (N, K, K, N))
        self.out = _linear(rngs, N * D, H, "tensor", None)
        self.up, self.down = _linear(rngs, H, F, None, "tensor"), _linear(rngs, F, H, "tensor", None)

    def __call__(self, x, positions, attend):
        y = self.norm(x)
        q, k, v = (linear(y).reshape(*y.shape[:-1], -1, D) for linear in (self.q, self.k, self.v))
        attended = attend(_rotated(q, positions), _rotated(k, positions), v)  # [..., N, D]
        x = x + self.out(jax.nn.sigmoid(self.gate(y)) * attended.reshape(*y.shape[:-1], -1))
        return x + self.down(jax.nn.silu(self.up(self.mlp_norm(x))))


class GatedModel(nnx.Module):
    """Layers whose attention output is multiplied by a learned gate, element by element.

    `tokenizer` is the path of a tokenizer.json, or of its directory; without it prompts are token ids.
    """

    n_positions, hidden_size, n_heads, n_kv_heads, head_size = 128, H, N, K, D

    def __init__(self, vocab_size: int = 256, tokenizer: str | None = None) -> None:
        rngs = nnx.Rngs(0)
        self.vocab_size, self.tokenizer = vocab_size, tokenizer
        self.tokens = nnx.Embed(self.vocab_size, H, rngs=rngs)
        self.layers = nnx.List([_Layer(rngs) for _ in range(3)])
        self.head = _linear(rngs, H, self.vocab_size, None, "tensor")

    def embed(self, token_ids, positions):
        return self.tokens(token_ids)

    def unembed(self, x):
        return self.head(x)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """The forward pass of training: [batch, length] token ids to logits [batch, length, V], no cache."""
        x, positions = self.tokens(token_ids), jnp.arange(token_ids.shape[1])
        for layer in self.layers:
            x = layer(x, positions, lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
        return self.head(x)


if __name__ == "__main__":
    with LLM(model=GatedModel()) as llm:
        for result in llm.generate([[1, 2, 3], [4] * 100], SamplingParams(max_tokens=8, temperature=0)):
            print(result.token_ids)
