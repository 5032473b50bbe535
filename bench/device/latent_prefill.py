"""Times a prompt's iteration in a model with latent attention: the absorbed form against the engine's choice.

    python -m bench.device.latent_prefill [--tokens 1024,2048] [--before 0] [--heads 16] [--layers 4]

Layers have DeepSeek-V3's sizes of keys and values (512 compressed elements, 64 rotated, heads of 128 and
128), and little else. Each case is one row of `tokens` new tokens after `before` cached ones.
Its forward pass runs once with the absorbed form alone, once as the engine chooses, and so on in turn;
compiling is not timed. With `--attention` follow_lengths in pure JAX, else in C if it can be built.

Prints two lines for each case, wall time and processor time, which depends less on other programs of the
machine: the median seconds of both forms, with minimum and maximum, and their ratio.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.config import Attention
from orca_jax.execution.attention_backend import choose_attention
from orca_jax.execution.attention_paths import AttentionPath, LatentByRow
from orca_jax.execution.matmul_backend import choose_products
from orca_jax.execution.stage import Stage
from orca_jax.families.attention_config import Latent, latent_attention
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig, alike
from orca_jax.families.norm_config import Norm
from orca_jax.families.rotary import Rotary
from orca_jax.host_memory import keep_large_buffers
from orca_jax.iteration.flat_batch import FlatLayout
from orca_jax.model.kv_cache import dtype_on_cpu, layer_cache
from orca_jax.sharding.partition import split_model
from orca_jax.sharding.random_parameters import random_parameters

BLOCK_SIZE, HIDDEN = 16, 512
LATENT = Latent(rank=512, rotary_size=64, plain_size=128, value_size=128)


def small_latent(n_heads: int, n_layers: int) -> ModelConfig:
    """The model; its last layer computes attention of one token a row."""
    own = latent_attention(LATENT, n_heads=n_heads, rotary=Rotary(size=64), qkv_bias=False, out_bias=False)
    norm = Norm(kind="rms_norm")
    feed_forward = FeedForward(size=HIDDEN, activation="silu", gated=True, bias=False)
    return ModelConfig(
        vocab_size=512,
        n_positions=1 << 16,
        hidden_size=HIDDEN,
        layers=alike(Layer(attention=own, feed_forward=feed_forward, norm=norm), n_layers),
        embedding=Embedding(size=HIDDEN, tied=False),
        positions=None,
        final_norm=norm,
    )


def prefill(
    model: ModelConfig, dtype: Any, path: AttentionPath, n_tokens: int, before: int
) -> Callable[[], tuple[float, float]]:
    """Return a function that runs the iteration and returns its wall seconds and processor seconds."""
    device = jax.devices()[0]
    (part,) = split_model(model, [device])
    parameters = random_parameters(model, 0, dtype, part.placement(model))
    stage = Stage(model, parameters, part, attention=path, products=choose_products(device, dtype))
    n_blocks = -(-(before + n_tokens) // BLOCK_SIZE)
    layout = FlatLayout(n_tokens, 4, n_blocks)
    words = np.zeros(stage.host_buffer.size(layout), np.int32)
    batch = layout.split(words)
    batch.token_ids[:] = np.random.default_rng(0).integers(0, model.vocab_size, n_tokens)
    batch.positions[:] = batch.slot_of_token[:] = before + np.arange(n_tokens)
    batch.row_start[1:] = n_tokens
    batch.kv_length[0] = before + n_tokens
    batch.block_table[0] = np.arange(n_blocks)

    def drawn(shape: tuple[int, ...], stored: np.dtype) -> jax.Array:
        numbers = jax.random.normal(jax.random.key(1), shape, dtype)
        return jax.lax.bitcast_convert_type(numbers, stored) if stored != dtype else numbers

    sizes, stored = {"n_blocks": n_blocks, "block_size": BLOCK_SIZE}, dtype_on_cpu(dtype)
    caches = [layer_cache(each, **sizes, stored=stored, make=drawn) for each in model.attentions]
    last_token, buffer = jnp.zeros(4, jnp.int32), jnp.asarray(words)

    def run() -> tuple[float, float]:
        nonlocal caches
        start, busy = time.perf_counter(), time.process_time()
        out, caches, _ = stage.forward(stage.weights, caches, last_token, buffer, layout=layout)
        jax.block_until_ready(out)
        return time.perf_counter() - start, time.process_time() - busy

    for _ in range(2):  # the returned caches are committed to their device, which needs another program
        run()
    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.device.latent_prefill", description=__doc__)
    parser.add_argument("--tokens", default="1024,2048", help="new tokens (default: 1024,2048)")
    parser.add_argument("--before", default="0", help="tokens in the cache before them (default: 0)")
    parser.add_argument("--heads", type=int, default=16, help="query heads (default: 16)")
    parser.add_argument("--layers", type=int, default=4, help="layers (default: 4)")
    parser.add_argument("--attention", choices=("native", "follow_lengths"), help="default: what can run")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each (default: 5)")
    flags = parser.parse_args()
    dtype, model = jnp.dtype(flags.dtype), small_latent(flags.heads, flags.layers)
    forced: Attention | None = flags.attention
    keep_large_buffers()
    chosen = choose_attention(
        jax.devices()[0], model, n_heads=flags.heads, block_size=BLOCK_SIZE, dtype=dtype, forced=forced
    )
    assert isinstance(chosen.path, LatentByRow)
    print(f"{chosen.description}; {flags.heads} heads, {flags.layers} layers, {dtype}, jax {jax.__version__}")
    for n_tokens in map(int, flags.tokens.split(",")):
        for before in map(int, flags.before.split(",")):
            runs = [
                prefill(model, dtype, path, n_tokens, before) for path in (chosen.path.absorbed, chosen.path)
            ]
            times = np.array([[run() for run in runs] for _ in range(flags.repeat)])  # [repeat, 2, 2]
            form = "plain" if LATENT.is_plain(n_tokens, before + n_tokens) else "absorbed"
            print(f"{n_tokens} tokens behind {before}, as chosen {form}")
            for i, name in enumerate(("passed", "processor")):
                absorbed, chosen_form = times[:, :, i].T.tolist()
                texts = [
                    f"{median(each):.3f} ({min(each):.3f} to {max(each):.3f})"
                    for each in (absorbed, chosen_form)
                ]
                ratio = median(absorbed) / median(chosen_form)
                print(
                    f"  {name}: absorbed {texts[0]} s, as chosen {texts[1]} s, ratio {ratio:.2f}", flush=True
                )


if __name__ == "__main__":
    main()
