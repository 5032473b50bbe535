"""Hugging Face transformers' logits and greedy tokens, from the files of scripts/golden/decoders.py."""

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import ServingConfig
from orca_jax.model import reference
from orca_jax.request.request import Request
from tests.device.harness import greedy_request, harness
from tests.device.model.golden import NAMES, load_golden


def family_of(name: str) -> str:
    return json.loads((load_golden(name).directory / "config.json").read_text())["model_type"]


# The first shape of each family; further ones have other switches of its config.json.
FIRST = {family_of(name): name for name in reversed(NAMES)}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FIRST.values() else pytest.mark.long) for name in NAMES],
)
def test_reference_gives_the_same_logits(name: str) -> None:
    golden = load_golden(name)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    forward = jax.jit(reference.forward, static_argnums=0)
    longest = max(map(len, golden.logits.values()))  # one length, one program; what follows changes nothing
    for row, expected in golden.logits.items():
        token_ids = np.zeros(longest, np.int32)
        token_ids[: len(expected)] = golden.prompts[row]
        logits = forward(checkpoint.config, checkpoint.parameters, jnp.array(token_ids))[: len(expected)]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-5)


# Families whose layers, together, have each part that decoders have.
PARTS = {
    *("bloom", "deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "gptj", "granite", "lfm2", "mixtral"),
    *("gemma4_text", "nemotron_h"),
}


def names_and_strides() -> Iterator[Any]:
    """Each name for a long test; the first of each family in PARTS also for a short one."""
    for name in NAMES:
        yield pytest.param(name, 2, marks=pytest.mark.long)
    for family in sorted(PARTS):
        yield pytest.param(FIRST[family], 16)


@pytest.mark.parametrize("name, alone_stride", list(names_and_strides()))
def test_engine_gives_the_same_tokens_alone_and_mixed(name: str, alone_stride: int) -> None:
    golden = load_golden(name)
    assert len(golden.prompts) in (32, 64)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    model = checkpoint.config

    def request(i: int) -> Request:
        return greedy_request(str(i), golden.prompts[i], len(golden.outputs[i]))

    numbers = range(len(golden.prompts))
    for max_bs in (1, 3, 32) if len(golden.prompts) == 64 else (32,):
        serving = ServingConfig(
            max_batch_size=max_bs,
            n_slots=max_bs * -(-model.n_positions // 16) * 16,
            max_batch_tokens=max(model.n_positions, 2 * max_bs),
        )
        # Of several sizes for the first families; one, and one program, for the others.
        buckets = (max_bs, serving.max_batch_tokens)[len(golden.prompts) == 32 :]
        engine = harness(model, checkpoint.parameters, serving, buckets=buckets)
        runs = [engine.run([request(i) for i in numbers])]
        if len(golden.prompts) == 32:  # once more, alone in the same programs
            alone = [engine.run([request(i)]) for i in numbers[::alone_stride]]
            runs.append({key: tokens for outputs in alone for key, tokens in outputs.items()})
        for outputs in runs:
            for key, tokens in outputs.items():
                sure = golden.sure(int(key))
                assert tuple(tokens[: len(sure)]) == sure, (name, max_bs, key)


def test_the_comparison_compares_something() -> None:
    """Most choices are sure, and prompts have from one token to nearly the model's length."""
    for name in NAMES:
        golden = load_golden(name)
        sure = sum(len(golden.sure(i)) for i in range(len(golden.outputs)))
        assert sure > 0.9 * sum(map(len, golden.outputs)), name
        assert min(map(len, golden.prompts)) == 1, name
        assert len({token for output in golden.outputs for token in output}) > 50, name
    assert len(NAMES) >= 6
