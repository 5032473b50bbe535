"""The demo model's network: GPT-2 as a function of its parameters, the loss over a text, and sampling."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from scripts.demo_model.corpus import SEED, encode_text

EPSILON = 1e-5

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of the model; its parameter count is dominated by 12 * n_layer * n_embd**2."""

    n_layer: int = 4
    n_embd: int = 256
    n_head: int = 4
    n_positions: int = 512
    vocab_size: int = 2048


def initial_params(shape: Shape, key: jax.Array) -> Params:
    """GPT-2's initial parameters under their Hugging Face names; matrices are [in, out]."""
    width = shape.n_embd
    matrices = {
        "transformer.wte.weight": (shape.vocab_size, width, 0.02),
        "transformer.wpe.weight": (shape.n_positions, width, 0.01),
    }
    vectors = {"transformer.ln_f.weight": np.ones(width), "transformer.ln_f.bias": np.zeros(width)}
    for i in range(shape.n_layer):
        for name, n_in, n_out, depth in (
            ("attn.c_attn", width, 3 * width, 1),
            ("attn.c_proj", width, width, 2 * shape.n_layer),
            ("mlp.c_fc", width, 4 * width, 1),
            ("mlp.c_proj", 4 * width, width, 2 * shape.n_layer),
        ):
            matrices[f"transformer.h.{i}.{name}.weight"] = (n_in, n_out, 0.02 / math.sqrt(depth))
            vectors[f"transformer.h.{i}.{name}.bias"] = np.zeros(n_out)
        for name in ("ln_1", "ln_2"):
            vectors[f"transformer.h.{i}.{name}.weight"] = np.ones(width)
            vectors[f"transformer.h.{i}.{name}.bias"] = np.zeros(width)
    keys = jax.random.split(key, len(matrices))
    params = {
        name: scale * jax.random.normal(k, (rows, columns), jnp.float32)
        for k, (name, (rows, columns, scale)) in zip(keys, matrices.items(), strict=True)
    }
    return params | {name: jnp.asarray(value, jnp.float32) for name, value in vectors.items()}


def logits_of(params: Params, tokens: jax.Array, n_head: int) -> jax.Array:
    """Logits [B, S, V] float32 of `tokens` [B, S] that start at position 0; dense, no cache."""

    def norm(x: jax.Array, name: str) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + EPSILON)
        return centred * scale * params[f"{name}.weight"] + params[f"{name}.bias"]

    def linear(x: jax.Array, name: str) -> jax.Array:
        return x @ params[f"{name}.weight"] + params[f"{name}.bias"]

    batch, length = tokens.shape
    x = params["transformer.wte.weight"][tokens] + params["transformer.wpe.weight"][:length]  # [B, S, H]
    n_layer = sum(name.endswith("ln_1.weight") for name in params)
    for i in range(n_layer):
        layer = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn")
        q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, n_head, -1), 2, 0)  # [B, S, N, D]
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x += linear(attended, f"{layer}.attn.c_proj")
        x += linear(jax.nn.gelu(linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc")), f"{layer}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ params["transformer.wte.weight"].T


@functools.partial(jax.jit, static_argnames="n_head")
def token_losses(params: Params, inputs: jax.Array, targets: jax.Array, n_head: int) -> jax.Array:
    """Cross-entropy [B, S] in nats of each target."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, inputs, n_head), targets)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss over a text file, as measured by `held_out_loss`."""

    nats_per_token: float
    bits_per_byte: float
    n_tokens: int
    n_bytes: int


def held_out_loss(params: Params, shape: Shape, tokenizer: Tokenizer, text: str) -> Loss:
    """The mean loss over every token of every document and the end-of-text token that closes it.

    Documents are separated by blank lines. A document's inputs are the end-of-text token and its own tokens,
    cut into windows of `n_positions` that neither overlap nor see each other. The bytes are those of the
    documents, plus one for each closing token.
    """
    rows, n_positions = [], shape.n_positions
    for ids in encode_text(tokenizer, text):
        for start in range(0, len(ids) - 1, n_positions):
            rows.append(ids[start : start + n_positions + 1])
    total = 0.0
    for start in range(0, len(rows), 8):
        inputs, targets = np.zeros((2, 8, n_positions), np.int32)
        mask = np.zeros((8, n_positions), np.float32)
        for j, row in enumerate(rows[start : start + 8]):
            n = len(row) - 1
            inputs[j, :n], targets[j, :n], mask[j, :n] = row[:-1], row[1:], 1.0
        total += float((token_losses(params, inputs, targets, shape.n_head) * mask).sum())
    n_tokens = sum(len(row) - 1 for row in rows)
    n_bytes = len(text.strip().replace("\n\n", "\n").encode()) + 1
    return Loss(total / n_tokens, total / math.log(2) / n_bytes, n_tokens, n_bytes)


def sample(
    params: Params, shape: Shape, tokenizer: Tokenizer, prompt: str, n: int, temperature: float
) -> str:
    """The prompt and `n` more tokens: the most likely at temperature 0, else sampled with a fixed seed."""
    ids = tokenizer.encode(prompt).ids
    rng = np.random.default_rng(SEED)
    window = np.zeros((1, len(ids) + n), np.int32)  # one shape: causal attention does not see what follows
    forward = jax.jit(functools.partial(logits_of, n_head=shape.n_head))
    while len(ids) < window.shape[1]:
        window[0, : len(ids)] = ids
        logits = np.asarray(forward(params, window)[0, len(ids) - 1], np.float64)
        if temperature > 0:
            logits = logits / temperature + rng.gumbel(size=logits.shape)
        ids.append(int(logits.argmax()))
    return tokenizer.decode(ids)
