"""Two checkpoints of one small model with different weights, and the tokens that each gives."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.families.model_config import ModelConfig
from orca_jax.model import reference
from tests.device.checkpoint.tiny_checkpoint import GPT2, gpt2_tensors, write_checkpoint

CONFIG = GPT2 | {
    "vocab_size": 260,
    "n_positions": 64,
    "n_embd": 16,
    "n_layer": 2,
    "n_inner": 32,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "tie_word_embeddings": False,
}
SIZES: dict[str, Any] = {"max_batch_size": 4, "n_slots": 160, "max_batch_tokens": 16, "block_size": 4}
PROMPTS = [[1, 2, 3], [*range(40, 55)], [7], [*range(40, 52), 9]]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def checkpoint(directory: Path, seed: int) -> Path:
    """A GPT-2 of two layers with weights from `seed`."""
    return write_checkpoint(directory / f"seed-{seed}", CONFIG, gpt2_tensors(CONFIG, seed=seed))


def arrays(directory: Path) -> dict[str, np.ndarray]:
    """The weights of a checkpoint by our names, in host memory."""
    parameters = load_checkpoint(directory, dtype=jnp.float32).parameters
    return {name: np.array(value) for name, value in parameters.items()}


def model_of(directory: Path) -> ModelConfig:
    return load_checkpoint(directory, dtype=jnp.float32).config


def reference_tokens(
    directory: Path, prompts: Sequence[Sequence[int]] = PROMPTS, n: int = 24
) -> list[list[int]]:
    """The greedy tokens of model/reference.py with the weights of a checkpoint."""
    return reference_of(model_of(directory), arrays(directory), prompts, n)


def reference_of(
    model: ModelConfig, weights: Mapping[str, np.ndarray], prompts: Sequence[Sequence[int]], n: int
) -> list[list[int]]:
    """The greedy tokens of model/reference.py, each from a pass over the whole text."""
    parameters = {name: jnp.asarray(value) for name, value in weights.items()}

    @jax.jit
    def next_token(text: jax.Array, length: jax.Array) -> jax.Array:
        return reference.forward(model, parameters, text)[length - 1].argmax()

    outputs = list[list[int]]()
    for prompt in prompts:
        text = np.zeros(max(map(len, prompts)) + n, np.int32)
        text[: len(prompt)] = prompt
        for length in range(len(prompt), len(prompt) + n):
            text[length] = next_token(text, length)
        outputs.append(text[len(prompt) : len(prompt) + n].tolist())
    return outputs


def tokens(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    """Tokens generated for these prompts."""
    return [result.token_ids for result in llm.generate(prompts, GREEDY)]


def tokens_of(directory: Path, **arguments: Any) -> list[list[int]]:
    """Tokens of a fresh engine with these weights."""
    with LLM(directory, **SIZES | arguments) as llm:
        return tokens(llm)


def remove_once_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each checkpoint disappears as soon as the engine has read it ahead."""
    memory = llm.controls._memory
    read_ahead = memory.read_ahead

    def read_and_remove(directory: Path) -> Callable[[], None]:
        install = read_ahead(directory)
        shutil.rmtree(directory)
        return install

    monkeypatch.setattr(memory, "read_ahead", read_and_remove)
