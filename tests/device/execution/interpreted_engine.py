"""Runs engines with the interpreted kernel and with pure-JAX attention, and prints their tokens in JSON.

PJRT_NPROC=16 python -m tests.device.execution.interpreted_engine gpt|rotary|latent
"""

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import tests.device.compiled_once  # noqa: F401
from orca_jax.config import Attention, ServingConfig
from orca_jax.families.attention_config import Latent, latent_attention
from orca_jax.families.model_config import ModelConfig, alike
from orca_jax.families.rotary import Rotary
from orca_jax.model.transformer import init_parameters
from tests.device.harness import greedy_request, harness, single_worker
from tests.gpt_config import gpt_config

MODEL = gpt_config(
    vocab_size=211, n_positions=160, hidden_size=128, n_layers=1, n_heads=2, ffn_size=96, vocab_multiple=8
)
LATENT = Latent(rank=128, rotary_size=64, plain_size=32, value_size=32, query_rank=48)
MODELS: dict[str, ModelConfig] = {
    "gpt": MODEL,
    "rotary": replace(
        MODEL,
        layers=alike(
            replace(
                MODEL.layers[0],
                attention=replace(MODEL.attention, n_kv_heads=1, rotary=Rotary(size=32)),
            ),
            2,
        ),
        positions=None,
    ),
    "latent": replace(
        MODEL,
        layers=alike(
            replace(
                MODEL.layers[0],
                attention=latent_attention(
                    LATENT, n_heads=4, rotary=Rotary(size=64), qkv_bias=False, out_bias=False
                ),
            ),
            1,
        ),
        positions=None,
    ),
}
SERVING = ServingConfig(max_batch_size=4, n_slots=640, max_batch_tokens=160, block_size=16)
LENGTHS = ((5, 4), (150, 3), (9, 2))  # input, output; the longest is two tiles


def tokens(model: ModelConfig, attention: Attention) -> dict[str, list[int]]:
    """Greedy tokens of requests that arrive one after another, so that batches mix both phases."""
    parameters = init_parameters(model, jax.random.key(3), jnp.dtype("float16"))
    # Spread, so that the best token is far ahead of the second.
    parameters = {name: value * (1 if value.ndim == 1 else 6) for name, value in parameters.items()}
    n_rows = 2 * SERVING.max_batch_size
    worker = single_worker(model, parameters, SERVING, n_rows=n_rows, attention=attention)
    rng = np.random.default_rng(5)
    requests = [
        greedy_request(str(i), rng.integers(0, model.vocab_size, n_input).tolist(), n_output)
        for i, (n_input, n_output) in enumerate(LENGTHS)
    ]
    engine = harness(model, parameters, SERVING, buckets=(8, 160), workers=[worker])
    return engine.run(requests, arrivals=list(range(len(requests))))


def main() -> None:
    """Run both."""
    model = MODELS[sys.argv[1]]
    print(json.dumps({name: tokens(model, name) for name in ("interpreted", "static")}))


if __name__ == "__main__":
    main()
