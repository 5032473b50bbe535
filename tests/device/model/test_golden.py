"""Hugging Face transformers' logits and greedy tokens, from the files of scripts/make_golden.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.checkpoint.locate import load_checkpoint
from orca_jax.config import ServingConfig
from orca_jax.model import reference
from tests.device.harness import greedy_request, harness
from tests.device.model.golden import NAMES, load_golden


@pytest.mark.parametrize("name", NAMES)
def test_reference_gives_the_same_logits(name: str) -> None:
    golden = load_golden(name)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    forward = jax.jit(reference.forward, static_argnums=0)
    longest = max(map(len, golden.logits.values()))  # one length, one program; what follows changes nothing
    for row, expected in golden.logits.items():
        token_ids = np.zeros(longest, np.int32)
        token_ids[: len(expected)] = golden.prompts[row]
        logits = forward(checkpoint.config, checkpoint.parameters, jnp.array(token_ids))[: len(expected)]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_engine_gives_the_same_tokens_alone_and_mixed(name: str) -> None:
    golden = load_golden(name)
    assert len(golden.prompts) in (32, 64)
    checkpoint = load_checkpoint(golden.directory, dtype=jnp.float32)
    model = checkpoint.config
    for max_bs in (1, 3, 32) if len(golden.prompts) == 64 else (1, 32):
        serving = ServingConfig(
            max_batch_size=max_bs,
            n_slots=max_bs * -(-model.n_positions // 16) * 16,
            max_batch_tokens=max(model.n_positions, 2 * max_bs),
        )
        buckets = (max_bs, serving.max_batch_tokens)
        engine = harness(model, checkpoint.parameters, serving, buckets=buckets)
        requests = [
            greedy_request(str(i), prompt, len(output))
            for i, (prompt, output) in enumerate(zip(golden.prompts, golden.outputs, strict=True))
        ]
        outputs = engine.run(requests)  # max_bs 1: each request alone
        for i in range(len(requests)):
            sure = golden.sure(i)
            assert tuple(outputs[str(i)][: len(sure)]) == sure, (name, max_bs, i)


def test_the_comparison_compares_something() -> None:
    """Most choices are sure ones, and prompts run from one token to nearly the model's length."""
    for name in NAMES:
        golden = load_golden(name)
        sure = sum(len(golden.sure(i)) for i in range(len(golden.outputs)))
        assert sure > 0.9 * sum(map(len, golden.outputs)), name
        assert min(map(len, golden.prompts)) == 1, name
        assert len({token for output in golden.outputs for token in output}) > 50, name
    assert len(NAMES) >= 6
