"""A model of Haliax and Equinox, trained by GRPO with rollouts of its own functions."""

# Haliax is not installed where the project is checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import gc
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.grpo_own_model import LENGTH, PARAMS, batch, reward
from orca_jax import LLM, FunctionModel
from orca_jax.rollout import Rollout

hax: Any = pytest.importorskip("haliax", reason="haliax is not installed")
eqx: Any = pytest.importorskip("equinox")

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Haliax and its libraries

BATCH, POSITION, KEYS = "batch", hax.Axis("position", 64), hax.Axis("keys", 64)
EMBED, MLP, VOCAB = hax.Axis("embed", 32), hax.Axis("mlp", 64), hax.Axis("vocab", 64)
HEADS, SIZE = hax.Axis("heads", 4), hax.Axis("head_size", 8)
Attend = Callable[[Any, Any, Any], Any]


class Layer(eqx.Module):
    """A layer of named axes: attention and a feed-forward part."""

    norm: Any
    mlp_norm: Any
    q: Any
    k: Any
    v: Any
    out: Any
    up: Any
    down: Any

    @classmethod
    def drawn(cls, key: jax.Array) -> Self:
        linear, keys = hax.nn.Linear.init, iter(jax.random.split(key, 6))
        norms = [hax.nn.LayerNorm.init(EMBED) for _ in range(2)]
        qkv = [linear(EMBED, (HEADS, SIZE), key=next(keys)) for _ in range(3)]
        out = linear((HEADS, SIZE), EMBED, key=next(keys))
        return cls(*norms, *qkv, out, linear(EMBED, MLP, key=next(keys)), linear(MLP, EMBED, key=next(keys)))

    def __call__(self, x: Any, attend: Attend) -> Any:
        y = self.norm(x)
        x = x + self.out(attend(self.q(y), self.k(y), self.v(y)))
        return x + self.down(hax.nn.silu(self.up(self.mlp_norm(x))))


class Model(eqx.Module):
    """Embeddings of tokens and positions, two layers, and a head."""

    tokens: Any
    positions: Any
    layers: tuple[Layer, ...]
    head: Any

    @classmethod
    def drawn(cls, seed: int) -> Self:
        keys = jax.random.split(jax.random.key(seed), 5)
        tokens, positions = (
            hax.random.normal(key, (axis, EMBED)) * 0.3
            for key, axis in zip(keys, (VOCAB, POSITION), strict=False)
        )
        layers = tuple(Layer.drawn(key) for key in keys[2:4])
        return cls(tokens, positions, layers, hax.nn.Linear.init(EMBED, VOCAB, key=keys[4], use_bias=False))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The forward pass of training, with Haliax's own attention: [B, L] to logits [B, L, V]."""
        position, keys = POSITION.resize(tokens.shape[1]), KEYS.resize(tokens.shape[1])
        x = self.tokens.take(VOCAB, hax.named(tokens, (BATCH, position)))
        x = x + self.positions[POSITION.name, : position.size]
        mask = hax.nn.attention.causal_mask(position, keys)

        def attend(q: Any, k: Any, v: Any) -> Any:
            k, v = (each.rename({"position": "keys"}) for each in (k, v))
            return hax.nn.attention.dot_product_attention("keys", "head_size", q, k, v, mask=mask)

        for layer in self.layers:
            x = layer(x, attend)
        return self.head(x).rearrange((BATCH, "position", "vocab")).array

    def weights(self) -> dict[str, Any]:
        """The weights as FunctionModel has them."""
        outside = {"tokens": self.tokens, "positions": self.positions, "head": self.head}
        arrays, _ = eqx.partition((outside, list(self.layers)), eqx.is_array)
        return {"outside": arrays[0], "layers": arrays[1]}


def served(model: Model) -> FunctionModel:
    """The same layers as functions of the engine's arrays [T, ...]."""
    _, head = eqx.partition(model.head, eqx.is_array)
    _, form = eqx.partition(model.layers[0], eqx.is_array)

    def embed(outside: Any, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        x = outside["tokens"].take(VOCAB, hax.named(token_ids, "position"))
        x = x + outside["positions"].take(POSITION, hax.named(positions, "position"))
        return x.rearrange(("position", "embed")).array

    def layer(weights: Any, x: jax.Array, positions: jax.Array, attend: Any) -> jax.Array:
        def named(*qkv: Any) -> Any:
            order = ("position", "heads", "head_size")
            return hax.named(attend(*(each.rearrange(order).array for each in qkv)), order)

        out = eqx.combine(weights, form)(hax.named(x, ("position", "embed")), named)
        return out.rearrange(("position", "embed")).array

    def unembed(outside: Any, x: jax.Array) -> jax.Array:
        logits = eqx.combine(outside["head"], head)(hax.named(x, ("position", "embed")))
        return logits.rearrange(("position", "vocab")).array

    return FunctionModel(
        embed=embed, layer=layer, unembed=unembed, **model.weights(), vocab_size=64, n_positions=64,
        hidden_size=32, n_heads=4, n_kv_heads=4, head_size=8,
    )  # fmt: skip


def log_probabilities(model: Model, tokens: jax.Array) -> jax.Array:
    """The log-probability of each token after the first, [B, L]; 0 for the first."""
    logits = jax.nn.log_softmax(model(tokens)[:, :-1])
    found = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(found, ((0, 0), (1, 0)))


@pytest.mark.timeout(400)
def test_ten_steps_of_grpo() -> None:
    """The log-probabilities are Haliax's in every step; nothing is compiled, no memory grows."""
    model, optimizer = Model.drawn(0), optax.adam(5e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    scored = eqx.filter_jit(log_probabilities)

    @eqx.filter_jit
    def step(model: Model, state: Any, arrays: dict[str, jax.Array]) -> tuple[Model, Any]:
        def loss(model: Model) -> jax.Array:
            ratio = jnp.exp(log_probabilities(model, arrays["tokens"]) - arrays["old"])
            advantage = arrays["advantage"][:, None]
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
            return -jnp.sum(gain * arrays["mask"]) / jnp.sum(arrays["mask"])

        changes, state = optimizer.update(eqx.filter_grad(loss)(model), state)
        return eqx.apply_updates(model, changes), state

    rng, rewards, compiled, memory = np.random.default_rng(0), list[float](), list[int](), list[int]()
    sizes: dict[str, Any] = {"max_batch_size": 16, "max_batch_tokens": 16, "n_slots": 2048}
    with LLM(served(model), **sizes, compile_ahead=True) as llm, Rollout(llm) as rollout:
        for _ in range(10):
            for _ in range(4):
                rollout.submit(rng.integers(0, 64, rng.integers(4, LENGTH - PARAMS.max_tokens)), PARAMS)
            groups = rollout.take(4)
            arrays = batch(groups)
            exact = np.asarray(scored(model, arrays["tokens"]))
            mask = np.asarray(arrays["mask"])
            np.testing.assert_allclose(np.asarray(arrays["old"])[mask], exact[mask], atol=1e-4)
            model, state = step(model, state, arrays)
            rollout.update(model.weights())
            rewards.append(float(np.mean([reward(sample) for group in groups for sample in group.samples])))
            gc.collect()
            compiled.append(llm.compiles.programs)
            memory.append(sum(array.nbytes for array in jax.live_arrays()))
        assert llm.weights_version == 10
    assert np.mean(rewards[-3:]) > rewards[0] + 0.1, rewards
    assert len({*compiled[1:]}) == 1 and max(memory[2:]) - min(memory[2:]) < 16 * 1024
