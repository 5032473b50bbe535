"""Shared parts of the scripts that make trainers' golden files: random weights, prompts, and the files.

A model's directory has a checkpoint as the trainer saved it, the config.json that it corresponds to, and
golden.npz: `prompts` [n, length] int32, `logits` [n, length, V] float32 of the trainer's own forward pass,
and `tokens` [n, 8], its greedy tokens after each prompt, computed without a cache.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Fields of config.json for the tiny models: those of most families, and Gemma's.
CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000,
    "tie_word_embeddings": False,
}
GEMMA_CONFIG: dict[str, Any] = CONFIG | {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
OUTPUT = Path(__file__).resolve().parents[2] / "tests" / "data" / "trainers"
MAX_BYTES = 300_000  # maximum bytes of a model's directory
_N_PROMPTS, _N_TOKENS, _N_GREEDY = 3, 13, 8
_MARGIN = 1e-3  # rounding alone can swap two logits that are closer
_SEED = 20221

Forward = Callable[[np.ndarray], Any]  # tokens [n, length] to logits [n, length, V]


def start(name: str) -> Path:
    """Make an empty directory for the model `name`."""
    directory = OUTPUT / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def drawn(tree: Any, seed: int = _SEED) -> Any:
    """Add noise to every array of the tree, so that none is all zeros or ones."""
    generator = np.random.default_rng(seed)

    def draw(values: Any) -> Any:
        noise = generator.normal(0, 0.2, values.shape)
        return (np.asarray(values, np.float32) + noise).astype(values.dtype)

    return jax.tree.map(draw, tree)


def finish(directory: Path, config: dict[str, Any], forward: Forward) -> None:
    """Write config.json and golden.npz, and check the directory's size."""
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generator = np.random.default_rng(_SEED)
    prompts = generator.integers(0, config["vocab_size"], (_N_PROMPTS, _N_TOKENS)).astype(np.int32)
    tokens = prompts
    margin = np.inf
    for _ in range(_N_GREEDY):
        logits = np.asarray(forward(tokens), np.float32)
        best = np.sort(logits[:, -1])
        margin = min(margin, float((best[:, -1] - best[:, -2]).min()))
        tokens = np.concatenate([tokens, logits[:, -1:].argmax(-1).astype(np.int32)], axis=1)
    if margin < _MARGIN:
        sys.exit(f"{directory.name}: two logits are {margin} apart; choose another seed")
    logits = np.asarray(forward(prompts), np.float32)
    np.savez_compressed(
        directory / "golden.npz", prompts=prompts, logits=logits, tokens=tokens[:, prompts.shape[1] :]
    )
    n_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if n_bytes > MAX_BYTES:
        sys.exit(f"{directory.name} has {n_bytes} bytes; at most {MAX_BYTES} are allowed")
    print(f"{directory.name}: {n_bytes} bytes, margin {margin:.2g}")
