"""Train a tiny GPT with Flax and optax, save it with Orbax, and serve what was saved.

    python -m examples.train_and_serve [--steps 300] [--directory DIR]

The model is plain Flax, and it is saved as in any training program: weights and optimizer state, by step. A
few lines of orca.json describe the model and the names of its weights; nothing is converted. Its tokens are
bytes.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from orca_jax import LLM, SamplingParams

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 256, 128, 64, 4, 2

# Describes the checkpoint to `orca serve` and LLM. docs/checkpoints.md explains every entry.
ORCA_JSON = {
    "model": {
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "hidden_size": WIDTH,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "ffn_size": 4 * WIDTH,
        "layer_norm_eps": 1e-6,
        "tie_embeddings": False,
    },
    "names": {
        "token_embedding": "model.tokens.embedding",
        "position_embedding": "model.positions.embedding",
        "layers.{i}.attn_norm.scale": "model.blocks.{i}.norm_1.scale",
        "layers.{i}.attn_norm.bias": "model.blocks.{i}.norm_1.bias",
        "layers.{i}.qkv.weight": {
            "name": [f"model.blocks.{{i}}.attention.{part}.kernel" for part in ("query", "key", "value")],
            "reshape": True,  # [H, N, D] as [H, N * D]
            "transpose": True,  # ours are [out, in]
        },
        "layers.{i}.qkv.bias": {
            "name": [f"model.blocks.{{i}}.attention.{part}.bias" for part in ("query", "key", "value")],
            "reshape": True,
        },
        "layers.{i}.out.weight": {
            "name": "model.blocks.{i}.attention.out.kernel",
            "reshape": True,
            "transpose": True,
        },
        "layers.{i}.out.bias": "model.blocks.{i}.attention.out.bias",
        "layers.{i}.mlp_norm.scale": "model.blocks.{i}.norm_2.scale",
        "layers.{i}.mlp_norm.bias": "model.blocks.{i}.norm_2.bias",
        "layers.{i}.up.weight": {"name": "model.blocks.{i}.up.kernel", "transpose": True},
        "layers.{i}.up.bias": "model.blocks.{i}.up.bias",
        "layers.{i}.down.weight": {"name": "model.blocks.{i}.down.kernel", "transpose": True},
        "layers.{i}.down.bias": "model.blocks.{i}.down.bias",
        "final_norm.scale": "model.norm.scale",
        "final_norm.bias": "model.norm.bias",
        "head.weight": {"name": "model.head.kernel", "transpose": True},
    },
    "ignore": ["optimizer.*"],
}


class Block(nnx.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, WIDTH] to the same."""
        causal = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm_1(x), mask=causal)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class TinyGPT(nnx.Module):
    """An ordinary Flax GPT."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """[batch, length] int32 to logits [batch, length, VOCABULARY]."""
        x = self.tokens(token_ids) + self.positions(jnp.arange(token_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(text: bytes, n_steps: int) -> tuple[TinyGPT, nnx.Optimizer]:
    """Train a model on `n_steps` batches of windows of the text."""
    model = TinyGPT(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: TinyGPT, optimizer: nnx.Optimizer, window: jax.Array) -> jax.Array:
        def loss(model: TinyGPT) -> jax.Array:
            logits = model(window[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    data, rng = np.frombuffer(text, np.uint8).astype(np.int32), np.random.default_rng(0)
    for i in range(n_steps):
        starts = rng.integers(0, len(data) - LENGTH, 16)
        value = step(model, optimizer, jnp.stack([data[s : s + LENGTH] for s in starts]))
        if i % 50 == 0 or i == n_steps - 1:
            print(f"step {i}: loss {float(value):.3f}", flush=True)
    return model, optimizer


def save(directory: Path, model: TinyGPT, optimizer: nnx.Optimizer, n_steps: int) -> None:
    """Save a step's checkpoint, as Orbax's manager lays it out, and orca.json next to it."""
    state = {
        "model": nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        "optimizer": nnx.to_pure_dict(nnx.state(optimizer)),
    }
    with ocp.CheckpointManager(directory.absolute()) as manager:
        manager.save(n_steps, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    description = ORCA_JSON | {"checkpoint": f"{n_steps}/default"}
    (directory / "orca.json").write_text(json.dumps(description, indent=2), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save, serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="batches to train on (default: 300)")
    parser.add_argument("--directory", type=Path, help="where to save (default: a temporary directory)")
    parser.add_argument("--prompt", default="def ", help="prompt to continue (default: 'def ')")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or Path(temporary) / "checkpoint"
        model, optimizer = train(Path(__file__).read_bytes(), args.steps)
        save(directory, model, optimizer, args.steps)
        with LLM(directory) as llm:
            params = SamplingParams(max_tokens=60, temperature=0)
            (result,) = llm.generate([list(args.prompt.encode())], params)
        print(args.prompt + bytes(result.token_ids).decode(errors="replace"))


if __name__ == "__main__":
    main()
